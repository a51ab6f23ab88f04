"""What a plan saves by name is, in the graph that is partitioned, what the planner meant: the same values, and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import pipeline_with
from numerics.test_recompute import Model
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from zerograph import passes
from zerograph.core.machine import machine_named
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.graph.nodes import Activation
from zerograph.planner.profile.liveness import Graph, saved

pytestmark = pytest.mark.costly


class Scaled(nn.Module):
    """A norm that casts its input and its parameter, as Gemma's, and a module that all layers share."""

    def __init__(self, width: int, shared: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.shared = [shared]

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + self.scale.float())
        return x + self.shared[0](self.down(torch.tanh(self.up(y.type_as(x)))))


class Cast(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Scaled(16, self.mix) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.sin(block(x))
        return self.head(x).square().mean()


class Attending(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


CASES: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (Attending, {"world_size": 2}),
    (Attending, {"world_size": 1, "dtype": torch.bfloat16}),
    (Cast, {"world_size": 1, "dtype": torch.bfloat16}),
    (Cast, {"world_size": 2, "dtype": torch.bfloat16}),
    (lambda: Attending(layers=10), {"world_size": 2}),
    (lambda: Cast(layers=10), {"world_size": 2, "repeat_layers": False}),
]


@pytest.mark.parametrize(("make", "options"), CASES)
def test_every_name_is_found_and_means_the_same_value(
    make: Callable[[], nn.Module], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given() -> tuple[nn.Module, tuple[Tensor]]:
        return make(), (torch.empty(2, 8, 5),)

    compiled = compile_only(given, **options)
    step, plan = compiled.frame.step, compiled.frame.plan
    graph = Graph(step)
    inside = [v for v in saved(graph, "auto").until if v not in graph.leaves and graph.layer[graph.maker[v]]]
    sizes: dict[str, set[int]] = {}
    for value in inside:
        sizes.setdefault(graph.activation[graph.maker[value]], set()).add(graph.size[value])
    layers = tuple(dict.fromkeys(graph.layer[graph.maker[value]] for value in inside))
    path = tmp_path / "plan.json"
    file = forecast_file("tests", compiled, machine_named("cpu"))
    path.write_text(replace(file, plan=replace(plan, recompute=layers, save=tuple(sizes))).to_json())

    found: dict[str, set[int]] = {}

    def recompute(gm: fx.GraphModule, plan: Any) -> int:
        tagged = passes.recompute(gm, plan)
        for node in gm.graph.nodes:
            fact, val = node.meta.get("zg"), node.meta.get("val")
            if isinstance(fact, Activation) and fact.name in sizes:
                source = node.args[0] if isinstance(val, Tensor) and _is_part(node) else node
                assert source.meta["recompute"] is CheckpointPolicy.MUST_SAVE, node
                found.setdefault(fact.name, set()).update([val.nbytes] if isinstance(val, Tensor) else [])
        return tagged

    monkeypatch.setattr("zerograph.compiler.rewrite.PIPELINE", pipeline_with("recompute", recompute))
    compile_only(given, plan=str(path), **options)
    assert found.keys() == sizes.keys()
    assert all(sizes[name] <= found[name] for name in sizes)


def _is_part(node: fx.Node) -> bool:
    return isinstance(node.args[0], fx.Node) and node.args[0].meta.get("zg") == node.meta["zg"]
