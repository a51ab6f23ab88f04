"""How a parameter is sharded, as its module and the markers of graphs say it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zerograph.core.layout import folded
from zerograph.core.plan import Param
from zerograph.runtime.comm.axes import experts_on, param_on
from zerograph.sharding.parallel import Parallel


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


def default_reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
