"""How tensors lie on the mesh of the ranks that share them: where placements are chosen and read, and nowhere else.

A mesh of ours has one dimension, along which a parameter is split by rows or replicated on every rank. Users may give
optimizers DTensors of their own, on any mesh.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.rows import rows_of


def placements_of(sharded: bool) -> tuple[Placement, ...]:
    """The placements of a parameter of ours: its rows split over the ranks, or replicated."""
    return (Shard(0) if sharded else Replicate(),)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds only its own part of ``tensor``: of a parameter of ours, its own rows."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def is_replicated(tensor: Tensor) -> bool:
    """Whether this rank holds all of ``tensor``, neither a part of it nor a part of its sum."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def needs_one_reduction(tensor: Tensor) -> bool:
    """Whether a number of ``tensor``, such as its norm, needs one reduction over :func:`group_of_ranks` at most."""
    return not isinstance(tensor, DTensor) or (
        tensor.device_mesh.ndim == 1 and (is_sharded(tensor) or is_replicated(tensor))
    )


def group_of_ranks(tensor: Tensor) -> ProcessGroup:
    """The ranks that share ``tensor``, a DTensor on a mesh of one dimension."""
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh.get_group()


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """The rows that this rank has of ``rows`` ones that are split over ``mesh``."""
    return rows_of(rows, mesh.get_local_rank(), mesh.size())
