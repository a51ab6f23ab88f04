"""An assigned ``.data`` of a sharded parameter is refused by all who would go on without it, also where no optimizer
holds the parameter."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from toy import Toy, adamw, build, compiled, differing, full, train

import zerograph
from zerograph.core.errors import ShardingError

REFUSED = r"\.data of a parameter of shape \[8, 4\] was assigned(.|\n)*with zerograph.gathered\(model\):"


def _sharded(frozen: bool = False) -> Toy:
    model = build().requires_grad_(not frozen)
    backend = compiled(model)
    return zerograph.shard(model, backend)


def _target(online: nn.Module, target: nn.Module) -> None:
    """As BYOL, MoCo and DQN are often written."""
    for t, p in zip(target.parameters(), online.parameters(), strict=True):
        if t.shape == (8, 4):
            t.data = 0.5 * t.data + 0.5 * p.data


def _targets() -> None:
    online, target = _sharded(), _sharded(frozen=True)  # of two backends
    train(online, optimizer := adamw(online), range(1))
    for moving in (target, copy.deepcopy(target)):  # the copy is not called yet
        before = full(moving)
        _target(online, moving)
        with pytest.raises(ShardingError, match=REFUSED):
            optimizer.step()
        assert differing(full(moving), before) == []
        _target(online, moving)
        with pytest.raises(ShardingError, match=REFUSED):
            moving.state_dict()
    train(online, optimizer, range(1, 3))


def test_of_a_target_that_no_optimizer_holds() -> None:
    run(2, _targets)


def _merged(folder: Path) -> None:
    model = _sharded(frozen=True)
    weight = model.get_parameter("up.weight")
    merged = weight.data.clone() * 2
    weight.data = merged
    with pytest.raises(ShardingError, match=REFUSED):
        zerograph.export(model, folder / "model.safetensors")
    assert not (folder / "model.safetensors").exists()
    weight.data = merged.clone()
    with pytest.raises(ShardingError, match=REFUSED), zerograph.gathered(model):
        pass
    with zerograph.gathered(model):  # it is told once
        plain = model.up.weight
        assert not torch.equal(plain, merged.full_tensor())
        plain.data = merged.full_tensor()  # as the hint says
        assert torch.equal(model.state_dict()["up.weight"], merged.full_tensor())
    dist.barrier()


def test_of_a_frozen_model_that_is_then_written(tmp_path: Path) -> None:
    run(2, _merged, tmp_path)
