"""The process groups along the axes of a mesh.

Along the last axis parameters are split. Where there is one before it, ranks of the same place in the last one have the
same shards: HSDP (Zhao et al., 2023), for ranks whose links differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zerograph.runtime.torch_private import group_among


@dataclass(frozen=True, slots=True)
class Axes:
    """The groups of a mesh that this rank is in.

    Attributes:
        everyone: all ranks of the mesh.
        shards: ranks that parameters are split over.
        replicas: ranks that have the same shards; None where no others do.
    """

    everyone: ProcessGroup
    shards: ProcessGroup
    replicas: ProcessGroup | None = None

    def places(self, group: ProcessGroup) -> list[int]:
        """The ranks of one of these groups, as ``everyone`` numbers them."""
        numbers = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(self.everyone))}
        return [numbers[rank] for rank in dist.get_process_group_ranks(group)]


def axes_of(mesh: DeviceMesh) -> Axes:
    """The groups of ``mesh``, whose ranks call this together when it has two axes and is first seen."""
    shards = mesh.get_group(mesh.ndim - 1)
    if mesh.ndim == 1:
        return Axes(shards, shards)
    if mesh.size(0) == 1:
        return Axes(shards, shards)
    replicas = mesh.get_group(0)
    for axes in _KNOWN.values():
        if axes.shards is shards and axes.replicas is replicas:
            return axes
    axes = Axes(_everyone(mesh, shards), shards, replicas)
    _KNOWN[axes.everyone.group_name] = axes
    return axes


def axes_named(name: str, group: ProcessGroup) -> Axes:
    """The axes of the mesh whose ranks are the ``group`` of that ``name``; one, where none with two was seen."""
    known = _KNOWN.get(name)
    return known if known is not None and known.everyone is group else Axes(group, group)


_KNOWN: dict[str, Axes] = {}
# By the name of all ranks' group. Markers in graphs know a group by its name.


def _everyone(mesh: DeviceMesh, like: ProcessGroup) -> ProcessGroup:
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())) and dist.group.WORLD is not None:
        return dist.group.WORLD
    return group_among(ranks, like, torch.device(mesh.device_type), "zerograph-mesh")
