"""Saved values reach AOTAutograd in its order, and the backward in the same."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from graphs import Builder, show
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zerograph.graph.nodes import Pair
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


def test_golden_graphs() -> None:
    """A product that is saved, and behind the mesh the seed of a mask."""
    f = Builder()
    x, mesh, seed = f.input("x", 4, 4), f.input("mesh", 4), f.input("seed", 4)
    mesh.meta["val"] = MESH
    product = f.mm(x, x)
    forward = f.output(f.call(torch.ops.aten.mul.Tensor, product, seed), product, mesh, seed)
    b = Builder()
    saved, mesh, seed, tangent = (b.input(name, 4, 4) for name in ("product", "mesh", "seed", "tangents_1"))
    mesh.meta["val"] = MESH
    backward = b.output(b.mm(saved, b.call(torch.ops.aten.mul.Tensor, tangent, seed)))
    before = show(backward)
    assert order_saved(Pair(forward, backward, 1)) == 2
    assert_expected_inline(
        f"{show(forward)}\n\n{', '.join(_inputs(backward))}\n{show(backward)}",
        """\
mm_default = mm(x, x)
mul_tensor = mul(mm_default, seed)
return [mul_tensor, mm_default, seed, mesh]

product, seed, mesh, tangents_1
mul_tensor = mul(tangents_1, seed)
mm_default = mm(product, mul_tensor)
return [mm_default]""",
    )
    assert show(backward) == before


def test_states_of_generators_come_before_opaque_objects() -> None:
    forward = _graph("y x mesh state size", "y x mesh state size")
    backward = _graph("size x mesh state tangents_1", "x")
    assert order_saved(Pair(forward, backward, 1)) == 2
    assert _returned(forward) == ["y", "x", "state", "mesh", "size"]
    assert _inputs(backward) == ["size", "x", "state", "mesh", "tangents_1"]


def test_what_is_in_order_stays() -> None:
    forward, backward = _graph("mesh y x size", "mesh y x mesh size"), _graph("size x mesh tangents_1", "x")
    assert order_saved(Pair(forward, backward, 2)) == 0
    assert _returned(forward) == ["mesh", "y", "x", "mesh", "size"]
    assert _inputs(backward) == ["size", "x", "mesh", "tangents_1"]
