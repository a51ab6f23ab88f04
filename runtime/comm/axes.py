"""The process groups along the axes of a mesh.

Along the last axis parameters are split. Where there is one before it, ranks of the same place in the last one have the
same shards: HSDP (Zhao et al., 2023), for ranks whose links differ. Experts that ranks have some of each are split over
those that have the same ones (Rajbhandari et al., 2022, "DeepSpeed-MoE"). Beside the data axis may lie one of tensor
parallelism, over which we communicate nothing of parameters: its ranks run the same programs, and fail together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zerograph.core.layout import Layout
from zerograph.core.plan import Param
from zerograph.runtime.buffers import dtype_name
from zerograph.runtime.torch_private import group_among, is_registered, resolve_group


@dataclass(frozen=True, slots=True)
class Axes:
    """The groups of a mesh that this rank is in.

    Attributes:
        name: of the mesh, for constants of graphs; other meshes of the same ranks have other names.
        everyone: all ranks that agree on plans and fail together: those of the mesh, and of an axis beside it.
        shards: ranks that parameters are split over.
        replicas: ranks that have the same shards; None where no others do.
        device_type: that groups of two axes communicate from; empty where there is one axis.
        experts: ranks next to each other that have other experts each; ``shards`` have the same ones then.
        beside: ranks of an axis that is none of ours, which compute other parts of the same parameters; None where no
            others do.
    """

    name: str
    everyone: ProcessGroup
    shards: ProcessGroup
    replicas: ProcessGroup | None = None
    device_type: str = ""
    experts: int = 1
    beside: ProcessGroup | None = None

    @classmethod
    def one(cls, group: ProcessGroup) -> Axes:
        """The only axis of a mesh of ``group``."""
        return cls(group.group_name, group, group)

    @property
    def groups(self) -> list[ProcessGroup]:
        """Those that we communicate over, each once, in an order that ranks share."""
        found = [self.everyone, self.shards, *([self.replicas] if self.replicas is not None else [])]
        return list(dict.fromkeys(found))

    def places(self, group: ProcessGroup) -> list[int]:
        """The ranks of one of these groups, as ``everyone`` numbers them."""
        numbers = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(self.everyone))}
        return [numbers[rank] for rank in dist.get_process_group_ranks(group)]


def axes_of(mesh: DeviceMesh) -> Axes:
    """The groups of ``mesh``, whose ranks call this together when it has two axes and is first seen."""
    shards = mesh.get_group(mesh.ndim - 1)
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return Axes.one(shards)
    replicas = mesh.get_group(0)
    wanted = mesh.device_type, _ranks_of(shards), _ranks_of(replicas)
    for axes in list(_KNOWN.values()):
        if not all(map(is_registered, axes.groups)):
            del _KNOWN[axes.name]  # names of groups that were destroyed are used again
        elif (axes.device_type, _ranks_of(axes.shards), _ranks_of(axes.replicas)) == wanted:
            return axes  # each mesh has groups of its own, of the same ranks
    everyone = everyone_of(mesh, shards)
    name = f"{everyone.group_name}, {replicas.size()} x {shards.size()}, {mesh.device_type}"
    axes = Axes(name, everyone, shards, replicas, mesh.device_type)
    _KNOWN[axes.name] = axes
    return axes


def axes_of_experts(axes: Axes, same: ProcessGroup, experts: int) -> Axes:
    """Those of parameters that ``experts`` ranks next to each other have other ones of, and the ranks ``same`` share,
    out of all ranks of ``axes``."""
    name = f"{axes.name}, {experts} with other experts"
    found = _KNOWN[name] = Axes(name, axes.everyone, same, experts=experts)
    return found


def experts_on(name: str) -> int:
    """How many ranks have other experts each of parameters on the mesh ``name``: 1 where all ranks share them."""
    known = _KNOWN.get(name)
    return known.experts if known is not None else 1


def param_on(
    mesh: str, ranks: int, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype], *,
    sharded: bool, trainable: bool = True,
) -> Param:  # fmt: skip
    """A parameter on the mesh of that name, which so many ``ranks`` share, as plans and transports know it.

    Args:
        dtypes: of its shards, of the full parameter, and of its gradient's reduction.
    """
    experts = experts_on(mesh)
    home, (shard, full, reduced) = Layout.home(ranks // experts, sharded=sharded), map(dtype_name, dtypes)
    return Param(name, tuple(shape), shard, full, reduced, trainable, home, experts=experts)


def axes_named(name: str) -> Axes:
    """The axes of the mesh of that name; of two only those that were seen, and else a group's."""
    known = _KNOWN.get(name)
    return known if known is not None else Axes.one(resolve_group(name))


_KNOWN: dict[str, Axes] = {}
# By name: markers in graphs are operators, which get constants.


def _ranks_of(group: ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if group is not None else []


def everyone_of(mesh: DeviceMesh, like: ProcessGroup) -> ProcessGroup:
    """All ranks of ``mesh``, who call this together, over what the group ``like`` communicates over."""
    ranks = mesh.mesh.flatten().tolist()
    if dist.group.WORLD is not None and ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return group_among(ranks, like, device, "zerograph-mesh")
