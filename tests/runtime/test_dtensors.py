"""How tensors lie on a mesh: parameters of ours, and DTensors that users made."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.layout import Layout, folded, is_divided, rows_of
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.runtime import dtensors


@pytest.mark.parametrize("sharded", [True, False])
def test_a_parameter_is_read_as_it_is_placed(sharded: bool) -> None:
    with simulated_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        param = DTensor.from_local(torch.ones(2, 3), mesh, dtensors.placements_of(sharded, mesh), run_check=False)
        assert dtensors.is_sharded(param) == sharded == (not dtensors.is_replicated(param))
        assert not dtensors.is_partial(param) and dtensors.is_split_by_rows(param) == sharded
        assert dtensors.split_over(param) is (mesh if sharded else None)
        if sharded:
            assert dtensors.groups_of_ranks(param) == (mesh.get_group(),)
            assert dtensors.group_of_ranks(param) is mesh.get_group() and dtensors.has_first_replica(param)
        assert dtensors.shard_ranks(mesh) == 4
        assert dtensors.own_part(torch.arange(7), mesh).tolist() == [2, 3] and rows_of(7, 1, 4) == slice(2, 4)
        assert dtensors.own_part(torch.arange(8).view(2, 4), mesh, 1).tolist() == [[1], [5]]


@pytest.mark.parametrize("rank", range(6))
def test_a_mesh_of_two_axes_splits_rows_over_the_last(rank: int) -> None:
    with simulated_rank(rank, 6):
        mesh = init_device_mesh("cpu", (2, 3))
        split, whole = (
            DTensor.from_local(torch.ones(2, 3), mesh, dtensors.placements_of(sharded, mesh), run_check=False)
            for sharded in (True, False)
        )
        assert split.placements == (Replicate(), Shard(0)) and whole.placements == (Replicate(), Replicate())
        assert dtensors.is_sharded(split) and not dtensors.is_replicated(split)
        assert dtensors.is_replicated(whole) and not dtensors.is_sharded(whole)
        assert dtensors.groups_of_ranks(split) == (mesh.get_group(1),) and dtensors.groups_of_ranks(whole) == ()
        assert dtensors.group_of_ranks(split) is mesh.get_group(1)
        assert (dtensors.split_over(split), dtensors.split_over(whole)) == (mesh, None)
        assert dtensors.has_first_replica(split) == (rank < 3)
        assert dtensors.shard_ranks(mesh) == 3
        own = rows_of(7, rank % 3, 3)
        assert dtensors.own_part(torch.arange(7), mesh).tolist() == list(range(7))[own]


def test_another_dimension_is_split_as_if_by_rows() -> None:
    """What graphs have is the parts of all ranks, one behind the other, and comes back as the parameter."""
    with simulated_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        for dim, shape in ((1, (2, 8, 3)), (2, (1, 3, 4)), (0, (8, 2))):
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            own = dtensors.own_part(whole, mesh, dim)
            param = DTensor.from_local(own, mesh, dtensors.placements_of(True, mesh, dim), run_check=False)
            assert dtensors.split_dim(param) == dim and param.shape == shape
            rows = torch.cat(whole.chunk(4, dim))
            assert dtensors.shared_by_us(param) == (tuple(rows.shape), Layout("rows", 4))
            assert folded(shape, dim, 4) == list(rows.shape)
            assert torch.equal(dtensors.unfolded(rows, shape, dim), whole)
        assert dtensors.split_dim(torch.ones(2)) == 0


def test_a_plain_tensor_is_whole() -> None:
    assert dtensors.is_replicated(torch.ones(2)) and not dtensors.is_sharded(torch.ones(2))
    assert dtensors.groups_of_ranks(torch.ones(2)) == () and dtensors.split_over(torch.ones(2)) is None


@pytest.mark.parametrize(
    ("sizes", "placements", "axes", "partial"),
    [
        ((4,), [Shard(1)], 1, False),
        ((4,), [Partial()], 0, True),
        ((2, 2), [Replicate(), Shard(0)], 1, False),
        ((2, 2), [Shard(1), Replicate()], 1, False),
        ((2, 2), [Shard(0), Shard(1)], 2, False),
        ((2, 2), [Shard(0), Partial()], 1, True),
        ((2, 2), [Partial(), Replicate()], 0, True),
    ],
    ids=["columns", "a sum", "rows of a half", "columns of a half", "quarters", "a sum of rows", "a sum of a half"],
)
def test_tensors_that_users_placed(
    sizes: tuple[int, ...], placements: list[Placement], axes: int, partial: bool
) -> None:
    with simulated_rank(0, 4):
        tensor = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", sizes), placements, run_check=False)
        assert dtensors.is_sharded(tensor) == (axes > 0) and not dtensors.is_replicated(tensor)
        assert dtensors.is_partial(tensor) == partial and len(dtensors.groups_of_ranks(tensor)) == axes


def test_a_parameter_is_split_where_each_rank_gets_a_row() -> None:
    assert [is_divided(shape, 4) for shape in ((4, 1), (5,), (3, 8), (0, 2), ())] == [True, True, False, False, False]
