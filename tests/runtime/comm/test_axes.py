"""The process groups along the axes of meshes, whole ones and those of a part of the job's ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerograph.dryrun.compile_only import simulated_rank
from zerograph.runtime.comm.axes import Axes, axes_named, axes_of
from zerograph.runtime.torch_private import group_among


def _ranks(axes: Axes) -> list[list[int] | None]:
    return [
        dist.get_process_group_ranks(group) if group is not None else None
        for group in (axes.everyone, axes.shards, axes.replicas)
    ]


def _named(axes: Axes) -> Axes:
    """As markers in graphs find them again."""
    return axes_named(axes.name)


def _one_axis() -> None:
    """A mesh of one axis, and one whose first has one rank: there are no replicas, nor another group; and another mesh
    of the same ranks, which has replicas, changes nothing of that."""
    world = dist.get_world_size()
    axes_of(init_device_mesh("cpu", (2, world // 2)))
    for shape in ((world,), (1, world)):
        mesh = init_device_mesh("cpu", shape)
        axes = axes_of(mesh)
        assert axes.everyone is axes.shards is mesh.get_group(mesh.ndim - 1) and axes.replicas is None
        assert _named(axes) == axes == axes_of(mesh)
        assert axes.places(axes.everyone) == list(range(world))


def test_without_replicas_all_ranks_are_those_of_the_shards() -> None:
    run(4, _one_axis)


def _two_axes() -> list[list[list[int] | None]]:
    """By shape the ranks of this one's groups."""
    found = []
    for shape in ((2, 2), (4, 1)):
        mesh = init_device_mesh("cpu", shape)
        axes = axes_of(mesh)
        assert axes.everyone is dist.group.WORLD, "which is there already"
        assert axes.replicas is not None  # which an equal mesh may have brought
        for group, axis in ((axes.shards, 1), (axes.replicas, 0)):
            assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mesh.get_group(axis))
        assert axes_of(mesh) is axes is _named(axes)
        assert axes.places(axes.shards) == dist.get_process_group_ranks(axes.shards)
        found.append(_ranks(axes))
    return found


def test_each_rank_is_in_a_row_and_in_a_column() -> None:
    everyone = [0, 1, 2, 3]
    for rank, (square, column) in enumerate(run(4, _two_axes)):
        assert square == [everyone, [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]]
        assert column == [everyone, [rank], everyone]


def _part() -> tuple[list[list[int] | None], list[int], list[int]] | None:
    """Ranks 3 and 1 are two replicas; the others make the mesh, as torch asks of all, and do nothing more."""
    mesh = DeviceMesh("cpu", [[1], [3]])
    if mesh.get_coordinate() is None:
        return None
    axes = axes_of(mesh)
    assert axes.everyone is not dist.group.WORLD and axes_of(mesh) is axes is _named(axes)
    total = torch.ones(1)
    dist.all_reduce(total, group=axes.everyone)
    assert total == 2
    assert axes.replicas is not None
    return _ranks(axes), axes.places(axes.shards), axes.places(axes.replicas)


def test_a_mesh_of_a_part_of_the_ranks_numbers_them_from_0() -> None:
    first, second, third, fourth = run(4, _part)
    assert first is None and third is None
    assert second == ([[1, 3], [1], [1, 3]], [0], [0, 1])
    assert fourth == ([[1, 3], [3], [1, 3]], [1], [0, 1])


def _among_some() -> None:
    """Ranks that are in other numbers of groups make one, and then all ranks do."""
    world = dist.get_world_size()
    some, last = dist.new_group([0, 1], timeout=timedelta(seconds=20)), dist.get_rank() == world - 1
    for _ in range(2):
        if dist.get_rank():
            ranks = list(range(1, world))
            group = group_among(ranks, dist.group.WORLD if last else some, torch.device("cpu"), "tests")
            assert dist.get_process_group_ranks(group) == ranks
            dist.barrier(group)
    dist.barrier(dist.new_group(timeout=timedelta(seconds=20)))


def test_a_group_of_some_ranks_is_made_whatever_groups_each_is_in() -> None:
    run(3, _among_some)


def _names() -> None:
    """Other meshes of the same ranks have other names, an equal one is the same, and a group is a mesh of one axis."""
    meshes = [axes_of(init_device_mesh("cpu", shape)) for shape in ((2, 2), (4, 1), (4,))]
    assert len({axes.name for axes in meshes}) == 3 and [_named(axes) for axes in meshes] == meshes
    equal = init_device_mesh("cpu", (2, 2))
    assert equal.get_group(1) is not meshes[0].shards and axes_of(equal) is meshes[0]
    other = dist.new_group(list(range(dist.get_world_size())))
    assert axes_named(other.group_name) == Axes.one(other)


def test_meshes_of_the_same_ranks_are_told_apart_by_their_names() -> None:
    run(4, _names)


def test_a_mesh_of_another_device_has_groups_of_its_own() -> None:
    with simulated_rank(0, 4):
        ours, theirs = (axes_of(init_device_mesh(device, (2, 2))) for device in ("cpu", "cuda"))
        assert ours.name != theirs.name and axes_named(theirs.name) is theirs
