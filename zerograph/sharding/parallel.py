"""Tensor and expert parallelism beside ZeRO: parameters that are DTensors already, on another axis of the mesh.

``parallelize_module`` splits weights over an axis, and the model computes on DTensors. ZeroGraph shards this rank's
part of each over the data axes, and gives the forward that part, whole again, as the DTensor that the model knows.
Outward the parameter lies on both axes, as ``fully_shard`` places it (Liang et al., 2024, "TorchTitan").

The ranks of a tensor-parallel axis have the same samples, and our axes are beside it. Those of an axis of experts have
samples of their own: it is inside of our axis, over which all other parameters are sharded, and the ranks that have the
same experts as this one shard these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.errors import UnsupportedError
from zerograph.core.layout import is_divided
from zerograph.runtime.dtensors import is_sharded
from zerograph.runtime.joined import joined, other_axis, our_axes
from zerograph.runtime.torch_private import as_dtensor, concatenated, is_registered, local_tensor, strided_shard


class Parallel(NamedTuple):
    """How a parameter lies on an axis that is not ours.

    Attributes:
        mesh: the axis.
        both: our axes, and then that one.
        placements: on the axis.
        shape: of the whole parameter, over all axes.
        stride: of the whole parameter.
        part: the shape of this rank's part along the axis, which the ranks of our axes share.
        computes: whether the forward reads a DTensor; else it reads a plain tensor, the same on all ranks of the axis,
            or this rank's experts.
    """

    mesh: DeviceMesh
    both: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    part: tuple[int, ...]
    computes: bool = True

    def inward(self, part: Tensor) -> Tensor:
        """What the forward reads, of this rank's ``part``; differentiable, and no communication in the forward."""
        if not self.computes:
            return part
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    @property
    def ours(self) -> DeviceMesh:
        """Our axes alone: the ranks that share this rank's part, or have the same experts."""
        return our_axes(self.both)

    @property
    def splits_rows(self) -> bool:
        """Whether ranks of the axis have other rows each."""
        return any(placement.is_shard(0) for placement in self.placements)


def parallel_of(param: Tensor, both: DeviceMesh) -> Parallel:
    """How ``param``, plain or a DTensor of the other axis, lies on the mesh of ``both``. A plain one counts as the same
    on all ranks of that axis."""
    axis = other_axis(both)
    assert axis is not None
    lies = isinstance(param, DTensor)
    placements = tuple(param.placements) if isinstance(param, DTensor) else (Replicate(),)
    stride = tuple(param.stride()) if lies else tuple(param.detach().contiguous().stride())
    computes = lies and not is_expert(param)
    return Parallel(axis, both, placements, tuple(param.shape), stride, tuple(local_tensor(param).shape), computes)


def let_experts_lie_on(axis: DeviceMesh) -> None:
    """Let DTensors on ``axis`` be what :func:`is_expert` finds: marks of their own do not survive ``model.to()``."""
    _OF_EXPERTS[axis] = axis.get_group()


def is_expert(param: Tensor) -> bool:
    """Whether an axis of experts divides it, and it lies on no other."""
    group = _OF_EXPERTS.get(param.device_mesh) if isinstance(param, DTensor) and is_sharded(param) else None
    return group is not None and is_registered(group)  # not of groups that were destroyed


_OF_EXPERTS: dict[DeviceMesh, ProcessGroup] = {}


def mesh_with_experts(params: Iterable[Tensor], mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of the ranks that have the same experts as this one, and then of those that have other ones; None where
    ``params`` have no experts. All ranks of ``mesh``, over which all other parameters are sharded, call this together.

    Raises:
        UnsupportedError: the experts lie on several axes, or on one that does not divide ``mesh`` into ranks that are
            next to each other.
    """
    axes = list(dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor) and is_expert(param)))
    if not axes:
        return None
    both = _before(axes[0], mesh) if len(axes) == mesh.ndim == 1 else None
    if both is not None:
        return both
    raise UnsupportedError(
        f"experts lie on {', '.join(map(str, axes))}, which is not the last of two axes of {mesh}",
        'make mesh = init_device_mesh(device, (ranks // n, n), mesh_dim_names=("dp", "ep")) of all ranks that train, '
        'divide the experts over mesh["ep"], and leave mesh= of zerograph.backend out',
    )


def parallels_of(
    named: Mapping[str, Tensor], mesh: DeviceMesh | None, on_experts: DeviceMesh | None
) -> dict[str, Parallel]:
    """Of those of ``named`` that lie on another axis than ours, ``mesh``, too, how they do.

    Args:
        on_experts: our axes and that of experts, if the backend knows one.
    """
    experts = {name: param for name, param in named.items() if is_expert(param)}
    if on_experts is None and experts:
        raise UnsupportedError(
            f"parameter {next(iter(experts))} has experts that ranks divide, and this backend has known none",
            "give this model a backend of its own, on several ranks",
        )
    both = on_experts if experts else mesh_of_both(named, mesh)
    if experts and mesh_of_both({n: p for n, p in named.items() if n not in experts}, mesh) is not None:
        raise UnsupportedError(
            "the model has experts that ranks divide, and DTensors of another axis", "one of the two; others stay plain"
        )
    return {n: parallel_of(p, both) for n, p in (experts or named).items()} if both is not None else {}


def _before(axis: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of ``axis`` and one before it that together have the ranks of ``mesh`` in their order."""
    root, ranks, size = axis._get_root_mesh(), mesh.mesh.tolist(), axis.size()
    row, place = divmod(ranks.index(dist.get_rank()), size)
    if axis.mesh.tolist() != ranks[row * size : (row + 1) * size]:
        return None
    for name in root.mesh_dim_names or ():
        if root[name].mesh.tolist() == ranks[place::size]:
            return joined(root[name], axis, of_experts=True)
    return None


def mesh_of_both(named: Mapping[str, Tensor], mesh: DeviceMesh | None) -> DeviceMesh | None:
    """``mesh`` and the axis that DTensors among ``named`` lie on; None where all are plain.

    Raises:
        UnsupportedError: it is none beside ``mesh``, over which they are to be sharded, or one of several.
    """
    axes = {name: param.device_mesh for name, param in named.items() if isinstance(param, DTensor)}
    found = list(dict.fromkeys(axes.values()))
    if not found:
        return None
    name, axis = next(iter(axes.items()))
    for other in found[1:]:
        raise UnsupportedError(
            f"parameter {name} is a DTensor on {axis}, and another one on {other}",
            "parallelize the whole model over one axis of the mesh",
        )
    _refuse_placements(named)
    return _joined(name, axis, mesh)


def mesh_beside(params: Iterable[Tensor], mesh: DeviceMesh) -> DeviceMesh | None:
    """``mesh`` and the axis that DTensors among ``params`` lie on; None where there is none, or where sharding will
    refuse it. All ranks of both axes call this together."""
    meshes = (param.device_mesh for param in params if isinstance(param, DTensor))
    axes = list(dict.fromkeys(other_axis(lies_on) or lies_on for lies_on in meshes))  # some may be sharded already
    if len(axes) != 1 or axes[0].ndim != 1 or mesh.ndim != 1:
        return None
    try:
        concatenated(mesh, axes[0])
    except RuntimeError:  # no axes of one mesh
        return None
    return joined(mesh, axes[0])


def _refuse_placements(named: Mapping[str, Tensor]) -> None:
    for name, param in named.items():
        if isinstance(param, DTensor) and not all(p.is_replicate() or type(p) is Shard for p in param.placements):
            raise UnsupportedError(
                f"parameter {name} is a DTensor placed as {param.placements}, which ZeroGraph cannot shard further",
                "place it as Shard(dim) or Replicate()",
            )


def _joined(name: str, axis: DeviceMesh, mesh: DeviceMesh | None) -> DeviceMesh:
    hint = (
        'tensor parallelism on another axis of one mesh works: parallelize_module(model, mesh["tp"], plan) and '
        'zerograph.backend(mesh=mesh["dp"]); a model that FSDP has sharded does not'
    )
    over = "one rank alone" if mesh is None else str(mesh)
    try:
        if mesh is not None and mesh.ndim == axis.ndim == 1:
            return joined(mesh, axis)
    except RuntimeError as error:
        raise UnsupportedError(
            f"parameter {name} is a DTensor on {axis} already, beside {over}: {error}", hint
        ) from error
    raise UnsupportedError(f"parameter {name} is a DTensor on {axis} already, and ZeroGraph shards over {over}", hint)


def splits_evenly(parallel: Parallel, ranks: int) -> bool:
    """Whether our ``ranks`` split the rows of a parameter. Where ranks of the other axis have other rows, DTensor
    describes that only if all have as many."""
    if not is_divided(parallel.part, ranks):
        return False
    return not parallel.splits_rows or parallel.shape[0] % (ranks * parallel.mesh.size()) == 0


def shared_part(param: Tensor, parallel: Parallel) -> Tensor:
    """This rank's part of ``param`` along the other axis.

    A plain one gets the values of the axis's first rank, as nothing made these equal: collective along that axis."""
    if not isinstance(param, DTensor) and not param.is_meta:
        return distribute_tensor(param.detach().contiguous(), parallel.mesh, parallel.placements).to_local()
    return local_tensor(param).detach()


def placed_on_both(part: Tensor, parallel: Parallel) -> DTensor:
    """``part``, sharded over our axes, as what it is on all of them."""
    assert isinstance(part, DTensor)
    *replicas, own = part.placements
    if own.is_shard(0) and parallel.splits_rows:
        own = strided_shard(0, parallel.mesh.size())
    placements = (*replicas, own, *parallel.placements)
    return as_dtensor(local_tensor(part), parallel.both, placements, parallel.shape, parallel.stride)
