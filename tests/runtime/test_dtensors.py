"""How tensors lie on a mesh: parameters of ours, and DTensors that users made."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.rows import is_divided, rows_of
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.runtime import dtensors


@pytest.mark.parametrize("sharded", [True, False])
def test_a_parameter_is_read_as_it_is_placed(sharded: bool) -> None:
    with simulated_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        param = DTensor.from_local(torch.ones(2, 3), mesh, dtensors.placements_of(sharded), run_check=False)
        assert dtensors.is_sharded(param) == sharded == (not dtensors.is_replicated(param))
        assert dtensors.needs_one_reduction(param)
        assert dtensors.group_of_ranks(param) is mesh.get_group()
        assert dtensors.own_rows(7, mesh) == rows_of(7, 1, 4) == slice(2, 4)


def test_a_plain_tensor_is_whole() -> None:
    assert dtensors.is_replicated(torch.ones(2)) and not dtensors.is_sharded(torch.ones(2))
    assert dtensors.needs_one_reduction(torch.ones(2))


@pytest.mark.parametrize(
    ("sizes", "placements", "sharded", "one"),
    [
        ((4,), [Shard(1)], True, True),
        ((4,), [Partial()], False, False),
        ((2, 2), [Replicate(), Shard(0)], True, False),
        ((2, 2), [Partial(), Replicate()], False, False),
    ],
    ids=["columns", "a sum", "rows of a half", "a sum of a half"],
)
def test_tensors_that_users_placed(
    sizes: tuple[int, ...], placements: list[Placement], sharded: bool, one: bool
) -> None:
    with simulated_rank(0, 4):
        tensor = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", sizes), placements, run_check=False)
        assert dtensors.is_sharded(tensor) == sharded and not dtensors.is_replicated(tensor)
        assert dtensors.needs_one_reduction(tensor) == one


def test_a_parameter_is_split_where_each_rank_gets_a_row() -> None:
    assert [is_divided(shape, 4) for shape in ((4, 1), (5,), (3, 8), (0, 2), ())] == [True, True, False, False, False]
