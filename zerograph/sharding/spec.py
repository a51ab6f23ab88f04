"""How a parameter is sharded, as its module and the markers of graphs say it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerograph.core.config import Config
from zerograph.core.errors import UnsupportedError
from zerograph.core.layout import folded, split_dimension
from zerograph.core.plan import Param
from zerograph.runtime.comm.axes import axes_of, axes_of_experts, experts_on, param_on
from zerograph.runtime.dtensors import shard_ranks
from zerograph.sharding.parallel import Parallel, is_expert, splits_evenly


class ShardSpec(NamedTuple):
    """How the marker of one parameter is to be read.

    Attributes:
        name: fully qualified name in the sharded model.
        group: name of the mesh (:class:`~zerograph.runtime.comm.axes.Axes`), empty at world size 1.
        dtype: dtype of the full tensor, for gather and compute.
        reduce_dtype: dtype of the gradient's reduction over ranks.
        sharded: split by rows over the ranks of ``group``, or unsharded on each.
        device: of the full tensor, where the outward parameter is off the accelerator that computes; else None.
        dim: along which the ranks split it. Graphs have it :func:`~zerograph.core.layout.folded`, as if by rows.
        follows: whether ``dtype`` is that of the parameter, whichever it gets; else the user gave it.
        keeps_reduce_dtype: whether the user gave ``reduce_dtype``.
    """

    name: str
    group: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    sharded: bool
    device: torch.device | None = None
    dim: int = 0
    follows: bool = True
    keeps_reduce_dtype: bool = False

    @property
    def constants(self) -> tuple[str, str, torch.dtype, torch.dtype, bool, torch.device | None]:
        """The arguments of the parameter's markers in graphs, after the shape."""
        return self[:6]

    def described(self, param: Tensor, ranks: int, parallel: Parallel | None = None) -> Param:
        """``param``, the outward one, as plans and transports know it: so many ``ranks`` share it, or of one that lies
        on another axis too this rank's part."""
        part = param.shape if parallel is None else parallel.part
        shape = folded(part, self.dim, ranks // experts_on(self.group))
        dtypes, trainable = (param.dtype, self.dtype, self.reduce_dtype), param.requires_grad
        return param_on(self.group, ranks, self.name, shape, dtypes, sharded=self.sharded, trainable=trainable)

    def computing_in(self, dtype: torch.dtype) -> ShardSpec:
        """That of the same parameter in another compute dtype."""
        reduce_dtype = self.reduce_dtype if self.keeps_reduce_dtype else default_reduce_dtype(dtype)
        return self._replace(dtype=dtype, reduce_dtype=reduce_dtype)


def spec_of(
    param: Tensor, name: str, config: Config, mesh: DeviceMesh | None, parallel: Parallel | None = None
) -> ShardSpec:
    """How ``param`` is sharded under ``config``; checks that it can be trained.

    Raises:
        UnsupportedError: complex or sparse parameters, or one that is sharded already by something else.
    """
    if isinstance(param, DTensor) and parallel is None:
        raise UnsupportedError(
            f"parameter {name} is a DTensor already ({param.placements})",
            "give ZeroGraph the plain model; FSDP, tensor-parallel or already sharded ones are not supported",
        )
    if param.is_complex() or param.layout != torch.strided:
        kind = "complex" if param.is_complex() else str(param.layout)
        raise UnsupportedError(
            f"parameter {name} is {kind}, which ZeroGraph cannot shard",
            "store its real and imaginary parts as two real parameters, or make it dense",
        )
    floating = param.is_floating_point()
    dtype = config.dtype if floating else None
    reduce_dtype = config.reduce_dtype if floating else None
    computes = dtype or param.dtype
    reduces = reduce_dtype or default_reduce_dtype(computes)
    own = mesh if parallel is None else parallel.ours
    world = shard_ranks(own) if own is not None else 1
    alone = mesh is None or (is_expert(param) and world == 1)
    # One rank gathers what lives off the device from there.
    splits = config.sharding > 0 and (not alone or config.offloads)
    dim = _dimension(param, parallel, world) if splits else None
    axes = axes_of(mesh) if mesh is not None else None
    if axes is not None and parallel is not None and is_expert(param):
        axes = axes_of_experts(axes, parallel.ours.get_group(), parallel.mesh.size())
    group = axes.name if axes is not None else ""
    spec = ShardSpec(name, group, computes, reduces, dim is not None, dim=dim or 0)
    return spec._replace(follows=dtype is None, keeps_reduce_dtype=reduce_dtype is not None)


def _dimension(param: Tensor, parallel: Parallel | None, ranks: int) -> int | None:
    """Along which ``ranks`` split it; None where each has the whole."""
    if parallel is None:
        return split_dimension(param.shape, ranks)
    if splits_evenly(parallel, ranks):
        return 0
    return split_dimension(parallel.part, ranks, by_rows=False) if is_expert(param) else None


def default_reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
