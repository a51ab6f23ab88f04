"""One parameter between its shards and its full tensor, and errors of rank 0 that all ranks raise."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from zerograph.core.errors import CheckpointError, ConfigError
from zerograph.runtime.dtensors import is_sharded, placements_of
from zerograph.sharding import shards
from zerograph.sharding.gathered import group_of

SHAPES = [(4, 3), (5, 2), (1, 3), (3,), (0, 2)]


def _there_and_back(sizes: tuple[int, ...]) -> None:
    """With rows that divide, that do not, that are fewer than ranks, and none; ``sizes`` are those of the mesh."""
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", sizes)
    split, everywhere = placements_of(True, mesh), placements_of(False, mesh)
    for shape in SHAPES:
        full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        sharded = distribute_tensor(full, mesh, split)
        mine = shards.as_shard(full, sharded)
        assert is_sharded(mine) and mine.shape == full.shape
        assert torch.equal(mine.to_local(), sharded.to_local())
        assert mine.to_local().is_contiguous() and mine.to_local().untyped_storage().nbytes() == mine.to_local().nbytes
        assert torch.equal(shards.full_value(sharded), full)
        pieces = shards.gather_to_first(sharded)
        assert torch.equal(torch.cat(pieces), full) if dist.get_rank() == 0 else pieces == []
        for like, local in (
            (sharded, torch.zeros_like(sharded.to_local())),
            (full, torch.zeros(shape).t().contiguous().t()),
        ):
            shards.send_from_first(full if dist.get_rank() == 0 else None, local, group, like)
            assert torch.equal(local, sharded.to_local() if like is sharded else full)
    whole = distribute_tensor(torch.arange(3.0), mesh, everywhere)
    assert not is_sharded(whole)
    assert len(shards.gather_to_first(whole)) == 1, "all have it"
    assert torch.equal(shards.full_value(whole), torch.arange(3.0))
    assert torch.equal(shards.as_shard(torch.ones(3), whole).to_local(), torch.ones(3))
    transposed = shards.as_shard(torch.arange(6.0).view(2, 3).t(), distribute_tensor(torch.zeros(3, 2), mesh, split))
    assert torch.equal(transposed.full_tensor(), torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("sizes", [(1,), (2,), (2, 1), (1, 2), (2, 2)])
def test_there_and_back(sizes: tuple[int, ...]) -> None:
    run(prod(sizes), _there_and_back, sizes)


def test_a_plain_parameter_is_its_own_shard() -> None:
    param = nn.Parameter(torch.arange(3.0))
    assert not is_sharded(param)
    assert shards.local_of(param).data_ptr() == param.data_ptr()
    value = shards.full_value(param)
    assert torch.equal(value, param) and value.data_ptr() != param.data_ptr() and not value.requires_grad
    assert torch.equal(shards.gather_to_first(param)[0], param)
    local = torch.zeros(3)
    shards.send_from_first(torch.ones(3), local, None, param)
    assert torch.equal(local, torch.ones(3))
    assert group_of(nn.Linear(2, 2)) is None and shards.is_first(None)


def _together(failing: tuple[int, ...], first: bool) -> str:
    def action() -> None:
        assert not first or dist.get_rank() == 0, "one rank works for all"
        if dist.get_rank() in failing:
            raise ConfigError(f"no room for {dist.get_rank()}", "buy a disk")

    try:
        with torch.device("meta"):  # a default device says where the user's tensors are made
            shards.agree(dist.group.WORLD, action, CheckpointError, first=first)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first", [True, False])
def test_what_fails_on_one_rank_is_an_error_on_all(first: bool) -> None:
    assert run(2, _together, (), first) == ["", ""]
    hint = "\n\nhint: buy a disk"
    assert run(2, _together, (0,), first) == [f"no room for 0{hint}", f"on rank 0: no room for 0{hint}"]


def test_a_rank_that_fails_beside_others_says_why_it_did() -> None:
    hint = "\n\nhint: buy a disk"
    assert run(2, _together, (0, 1), False) == [f"no room for 0{hint}", f"no room for 1{hint}"]
    assert run(2, _together, (1,), False) == [f"on rank 1: no room for 1{hint}", f"no room for 1{hint}"]


def test_errors_in_one_sentence() -> None:
    assert shards.describe(ConfigError("no room", "buy a disk")) == "no room"
    assert shards.describe(KeyError("w")) == "KeyError: 'w'"


def test_an_interrupt_of_rank_0_is_no_error_of_its_work() -> None:
    def action() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shards.agree(None, action, CheckpointError, first=True)
