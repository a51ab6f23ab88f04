"""How tensors lie on the mesh of the ranks that share them: where placements are chosen and read, and nowhere else.

Along the last axis of a mesh of ours a parameter is split by rows, or along another dimension where it has few, or
replicated on every rank; along one before it, it is replicated (:mod:`~zerograph.runtime.comm.axes`). An axis of tensor
parallelism, or of experts, may come after those (:mod:`~zerograph.runtime.joined`). Users may give optimizers DTensors
of their own, on any mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.layout import Layout, folded, rows_of
from zerograph.runtime.joined import our_axes

Groups = tuple[ProcessGroup, ...]
"""The ranks over which a tensor is split, along each axis that splits it; none where every rank has all of it."""


def placements_of(sharded: bool, mesh: DeviceMesh, dim: int = 0) -> tuple[Placement, ...]:
    """The placements of a parameter of ours on ``mesh``: split over the last axis along ``dim``, or replicated."""
    return (*[Replicate()] * (mesh.ndim - 1), Shard(dim) if sharded else Replicate())


def shard_ranks(mesh: DeviceMesh) -> int:
    """How many ranks split a parameter of ours on ``mesh``."""
    return mesh.size(mesh.ndim - 1)


def splits(placement: Placement) -> bool:
    """Whether ranks hold different parts: a strided shard, which ``is_shard()`` leaves out, is one too."""
    return not placement.is_replicate() and not placement.is_partial()


def split_along(placement: Placement) -> int:
    """The dimension along which ranks hold different parts; 0 where they do not."""
    return placement.dim if splits(placement) else 0  # type: ignore[attr-defined, no-any-return]


def split_dim(param: Tensor) -> int:
    """The dimension along which our ranks split a parameter of ours; 0 where they do not."""
    return split_along(param.placements[our_axes(param.device_mesh).ndim - 1]) if isinstance(param, DTensor) else 0


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds only its own part of ``tensor``: of a parameter of ours, its own rows."""
    return isinstance(tensor, DTensor) and any(map(splits, tensor.placements))


def is_replicated(tensor: Tensor) -> bool:
    """Whether this rank holds all of ``tensor``, neither a part of it nor a part of its sum."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def is_partial(tensor: Tensor) -> bool:
    """Whether ranks hold parts of a sum: their own numbers of it, such as norms, say nothing of it."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def is_split_by_rows(tensor: Tensor) -> bool:
    """Whether ranks along one axis have the rows of ``tensor``, in their order, and nothing else splits it."""
    found = [p for p in tensor.placements if splits(p)] if isinstance(tensor, DTensor) else []
    return len(found) == 1 and found[0] == Shard(0)


def groups_of_ranks(tensor: Tensor) -> Groups:
    """The ranks over which ``tensor`` is split, those of each axis that splits it."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = (axis for axis, placement in enumerate(tensor.placements) if splits(placement))
    return tuple(tensor.device_mesh.get_group(axis) for axis in axes)


def group_of_ranks(tensor: Tensor) -> ProcessGroup:
    """The ranks over which ``tensor`` is split, a DTensor that is split along one axis."""
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh.get_group(_split_axis(tensor))


def split_over(tensor: Tensor) -> DeviceMesh | None:
    """The mesh of a tensor of which each rank holds only its own part; None where it holds all."""
    return tensor.device_mesh if isinstance(tensor, DTensor) and is_sharded(tensor) else None


def has_first_replica(tensor: Tensor) -> bool:
    """Whether this rank has a part of the first replica of ``tensor``, a DTensor that is split along one axis."""
    assert isinstance(tensor, DTensor)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # of this rank's own tensor
    return not any(place for axis, place in enumerate(coordinate) if axis != _split_axis(tensor))


def _split_axis(tensor: DTensor) -> int:
    return next(axis for axis, placement in enumerate(tensor.placements) if splits(placement))


def own_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of ``tensor`` lies in the whole, along each dimension."""
    axes = range(tensor.device_mesh.ndim) if isinstance(tensor, DTensor) else ()
    return tuple(slice(*bounds) for bounds in _bounds(tensor, axes))


def shared_by_us(param: DTensor) -> tuple[tuple[int, ...], Layout]:
    """The shape of what the ranks that we shard over share of a parameter of ours, as they split it by rows, and how
    they do: of one that lies on another axis too, this rank's part along that."""
    ours = our_axes(param.device_mesh)
    shape = [end - begin for begin, end in _bounds(param, range(ours.ndim, param.device_mesh.ndim))]
    own, ranks = param.placements[ours.ndim - 1], shard_ranks(ours)
    return tuple(folded(shape, split_along(own), ranks)), Layout.home(ranks, sharded=splits(own))


def _bounds(tensor: Tensor, axes: Iterable[int]) -> list[tuple[int, int]]:
    """First and one-past-last index, along each dimension, of what ``axes`` leave this rank.

    An axis splits what those before it leave, and a strided one, by its name in torch, what those after it leave."""
    bounds = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return bounds
    mesh, coordinate, placements = tensor.device_mesh, tensor.device_mesh.get_coordinate(), tensor.placements
    assert coordinate is not None  # of this rank's own tensor
    split = [axis for axis in axes if splits(placements[axis])]
    strided = [axis for axis in split if placements[axis] != Shard(placements[axis].dim)]  # type: ignore[attr-defined]
    for axis in (*(axis for axis in split if axis not in strided), *reversed(strided)):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        begin, end = bounds[dim]
        rows = rows_of(end - begin, coordinate[axis], mesh.size(axis))
        bounds[dim] = begin + rows.start, begin + rows.stop
    return bounds


def own_part(value: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """The part that this rank has of ``value``, which is split over ``mesh`` along ``dim``; a view."""
    rows = rows_of(value.shape[dim], mesh.get_local_rank(mesh.ndim - 1), shard_ranks(mesh))
    return value.narrow(dim, rows.start, rows.stop - rows.start)


def unfolded(full: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """A parameter of ``shape`` of what is :func:`~zerograph.core.layout.folded` of it; a copy, unless ``dim`` is 0."""
    return full.unflatten(0, (-1, shape[0])).movedim(0, dim).flatten(dim, dim + 1) if dim else full
