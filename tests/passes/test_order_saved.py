"""Saved values reach AOTAutograd in its order, and the backward in the same."""

from __future__ import annotations

from typing import Any

from graphs import Builder
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zerograph.passes import order_saved

MESH = object()
SIZE = ShapeEnv().create_unbacked_symint()


def _graph(names: str, returns: str | None = None) -> fx.GraphModule:
    """A graph of the inputs ``names`` that returns those of them in ``returns``."""
    b = Builder()
    values: dict[str, Any] = {"mesh": MESH, "size": SIZE}
    made = {name: b.input(name, 4) for name in names.split()}
    for name, value in values.items():
        if name in made:
            made[name].meta["val"] = value
    return b.output(*(made[name] for name in (returns or "").split()))


def _inputs(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.find_nodes(op="placeholder", sort=True)]


def _returned(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in next(iter(gm.graph.find_nodes(op="output"))).args[0]]


def test_states_of_generators_come_before_opaque_objects() -> None:
    forward = _graph("y x mesh state size", "y x mesh state size")
    backward = _graph("size x mesh state tangents_1", "x")
    assert order_saved(forward, backward, 1) == 2
    assert _returned(forward) == ["y", "x", "state", "mesh", "size"]
    assert _inputs(backward) == ["size", "x", "state", "mesh", "tangents_1"]


def test_what_is_in_order_stays() -> None:
    forward, backward = _graph("mesh y x size", "mesh y x mesh size"), _graph("size x mesh tangents_1", "x")
    assert order_saved(forward, backward, 2) == 0
    assert _returned(forward) == ["mesh", "y", "x", "mesh", "size"]
    assert _inputs(backward) == ["size", "x", "mesh", "tangents_1"]
