"""How tensors lie on the mesh of the ranks that share them: where placements are chosen and read, and nowhere else.

Along the last axis of a mesh of ours a parameter is split by rows, or replicated on every rank; along one before it, it
is replicated (:mod:`~zerograph.runtime.comm.axes`). Users may give optimizers DTensors of their own, on any mesh.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.layout import rows_of


def placements_of(sharded: bool, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of a parameter of ours on ``mesh``: its rows split over the last axis, or replicated."""
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0) if sharded else Replicate())


def shard_ranks(mesh: DeviceMesh) -> int:
    """How many ranks split a parameter of ours on ``mesh``."""
    return mesh.size(mesh.ndim - 1)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds only its own part of ``tensor``: of a parameter of ours, its own rows."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def is_replicated(tensor: Tensor) -> bool:
    """Whether this rank holds all of ``tensor``, neither a part of it nor a part of its sum."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def needs_one_reduction(tensor: Tensor) -> bool:
    """Whether a number of ``tensor``, such as its norm, needs one reduction over :func:`group_of_ranks` at most."""
    if not isinstance(tensor, DTensor):
        return True
    split = [placement.is_shard() for placement in tensor.placements]
    return sum(split) <= 1 and not any(placement.is_partial() for placement in tensor.placements)


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
    return next(axis for axis, placement in enumerate(tensor.placements) if placement.is_shard())


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """The rows that this rank has of ``rows`` ones that are split over ``mesh``."""
    return rows_of(rows, mesh.get_local_rank(mesh.ndim - 1), shard_ranks(mesh))
