"""Parameters with fewer rows than ranks, as a few experts in one tensor: ranks split them along another dimension.

Tests ``sharding/spec.py``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics.compare import Case, Result, assert_same, check, full_values, normal, pickled_and_back, stages
from ranks import run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.swa_utils import AveragedModel

import zerograph

WORLD, EXPERTS, WIDTH = 4, 2, 8


class Net(nn.Module):
    """Two experts of all tokens; ``wide`` divides by its last dimension alone. Whole stay ``position``, of one row, and
    ``odd``, of which four ranks divide none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH)
        self.position, self.odd = nn.Parameter(torch.randn(1, 6, WIDTH)), nn.Parameter(torch.randn(2, 3, 5))
        self.wide = nn.Parameter(torch.randn(2, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("nw,ehw->enh", self.inner(x), self.up).relu()
        found = torch.einsum("enh,ewh->nw", hidden, self.down)
        return self.head(found + (self.position.mean((0, 1)) + self.wide.mean((0, 1))) * self.odd.mean())


def native(model: nn.Module) -> torch.optim.Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def case() -> Case:
    return Case(Net(), normal(WIDTH))


def case_native() -> Case:
    return Case(Net(), normal(WIDTH), optimizer=native)


def _trains(options: dict[str, Any], own_optimizer: bool, chosen: tuple[int, ...]) -> dict[int | None, Result]:
    return stages(case_native if own_optimizer else case, chosen, options)


@pytest.mark.parametrize(
    ("options", "own_optimizer", "chosen"),
    [
        ({}, False, (1, 3)),  # parameters whole, and split
        ({"compute": "inductor"}, True, (3,)),
        ({"offload": "parameters"}, True, (3,)),
        ({"shape": (2, 2)}, True, (3,)),
    ],
)
def test_stages(options: dict[str, Any], own_optimizer: bool, chosen: tuple[int, ...], tmp_path: Path) -> None:
    given = options | ({"path": str(tmp_path)} if "offload" in options else {})
    for result in run(WORLD, _trains, given, own_optimizer, chosen):
        check(result)


def _signs() -> None:
    """An optimizer that takes gradients of this rank, and gathers momenta, by itself."""
    found = []
    for stage in (0, 1):
        torch._dynamo.reset()
        model = Net()
        backend = zerograph.backend(stage=stage, compute="eager")
        model.compile(backend=backend)
        optimizer = zerograph.optim.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2)
        for step in range(5):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_values(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_averages_as_signs() -> None:
    run(WORLD, _signs)


def _moved(path: str) -> None:
    model = Net()
    average = AveragedModel(model)
    backend = zerograph.backend(stage=3, compute="eager")
    model.compile(backend=backend)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    assert isinstance(model.up, DTensor) and model.up.placements == (Shard(1),) and model.up.to_local().is_contiguous()
    assert isinstance(model.up.grad, DTensor) and model.up.grad.to_local().shape == (EXPERTS, 2 * WIDTH // WORLD, WIDTH)
    assert [getattr(model, name).placements for name in ("wide", "position", "odd")] == [
        (Shard(2),),
        (Replicate(),),
        (Replicate(),),
    ]
    values = full_values(model)
    average.update_parameters(model)
    assert_same(full_values(average.module), values)
    zerograph.export(model, f"{path}/model.safetensors")
    dist.barrier()
    assert_same(values, load_file(f"{path}/model.safetensors"))
    with zerograph.gathered(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    doubled = {name: 2 * value for name, value in values.items()}
    assert_same(full_values(model), doubled)
    assert_same(full_values(copy.deepcopy(model)), doubled)
    pickled_and_back(model)
    assert_same(full_values(model), doubled)
    model.load_state_dict(load_file(f"{path}/model.safetensors"))
    assert_same(full_values(model), values)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{path}/dcp")
    with torch.device("meta"):
        other = Net()
    zerograph.shard(other, other_backend := zerograph.backend(stage=3, compute="eager"))
    other.compile(backend=other_backend)
    zerograph.materialize(other, files=f"{path}/model.safetensors")
    assert_same(full_values(other), values)
    assert torch.equal(other(x), model(x))


def _alone(path: str) -> None:
    alone = Net()
    states = alone.state_dict()
    dcp.load(states, checkpoint_id=f"{path}/dcp")
    assert_same(states, load_file(f"{path}/model.safetensors"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_go_in_and_out(tmp_path: Path) -> None:
    run(WORLD, _moved, str(tmp_path))
    run(2, _alone, str(tmp_path))


def _uncompiled() -> None:
    """Forwards that Dynamo is told to leave alone: some whole models, and reads outside of any."""
    truth, ours = Net(), Net()
    backend = zerograph.backend(stage=3, compute="eager")
    ours.compile(backend=backend)
    zerograph.shard(ours, backend)
    x = torch.randn(WORLD, WIDTH, generator=torch.Generator().manual_seed(0))
    own = x[dist.get_rank() : dist.get_rank() + 1]
    with torch.compiler.set_stance("force_eager"):
        ours(own).square().mean().backward()
    truth(x).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), truth.parameters(), strict=True):
        assert mine.grad is not None
        found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(found, theirs.grad, rtol=1e-4, atol=1e-6)


def test_an_uncompiled_forward() -> None:
    run(WORLD, _uncompiled)
