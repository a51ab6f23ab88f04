"""Meshes of our axes and another one, on which a model's tensors lie already: of tensor parallelism, or of experts.

Our axes come first, as ``fully_shard`` joins them: parameters are split along the other axis first, and what a rank has
of one is then split over ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zerograph.runtime.comm.axes import everyone_of
from zerograph.runtime.torch_private import concatenated, is_registered


@dataclass(frozen=True, slots=True)
class _Joined:
    ours: DeviceMesh
    other: DeviceMesh
    everyone: ProcessGroup
    of_experts: bool


def joined(ours: DeviceMesh, other: DeviceMesh, *, of_experts: bool = False) -> DeviceMesh:
    """The mesh of the axes of both, the same object each time: AOTAutograd tells equal meshes apart. All of its ranks
    call this together.

    Args:
        of_experts: whether ranks along ``other`` have samples of their own, so that we communicate between all.

    Raises:
        RuntimeError: they are not different axes of one mesh.
    """
    mesh = concatenated(ours, other)
    for known in list(_JOINED):
        if known == mesh and not is_registered(_JOINED[known].everyone):
            del _JOINED[known]  # of groups that were destroyed
        elif known == mesh:
            return known
    _JOINED[mesh] = _Joined(ours, other, everyone_of(mesh, ours.get_group(ours.ndim - 1)), of_experts)
    return mesh


def our_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of ``mesh`` that we shard over: all of them, unless another one was joined to ours."""
    known = _known(mesh)
    return known.ours if known is not None else mesh


def other_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis that was joined to ours; None where there is none."""
    known = _known(mesh)
    return known.other if known is not None else None


def everyone_on(mesh: DeviceMesh) -> ProcessGroup:
    """All ranks of ``mesh``, which was joined."""
    return _JOINED[mesh].everyone


def shards_of(mesh: DeviceMesh) -> ProcessGroup | None:
    """The ranks over which we split what lies on ``mesh``; None of experts, which fewer share than we communicate
    between."""
    ours, known = our_axes(mesh), _known(mesh)
    return None if known is not None and known.of_experts else ours.get_group(ours.ndim - 1)


def _known(mesh: DeviceMesh) -> _Joined | None:
    found = _JOINED.get(mesh)
    return found if found is not None and is_registered(found.everyone) else None  # not of groups that were destroyed


_JOINED: dict[DeviceMesh, _Joined] = {}
# By equality: a copy, or a pickle, of a DTensor brings a mesh of its own.
