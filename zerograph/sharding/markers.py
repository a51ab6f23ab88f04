"""Markers that run: in code that is not compiled, and in graphs that another backend has compiled.

A parameter that belongs to a backend is read through that (:mod:`~zerograph.sharding.uncompiled`). A graph of another
backend's, and a model that came from a file, know no more than the process group; their reads and reductions are
compared between its ranks as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph.graph.torch_private import skip_frame
from zerograph.runtime.comm.axes import Axes, axes_named, param_on
from zerograph.runtime.comm.connecting import connect_axes
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.residency import StepCount
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.runtime.torch_private import backend_name

_OF_AXES: dict[str, tuple[Axes, UncompiledReads]] = {}
# Operators get constants: of a mesh they know the name.


def reads_of(name: str, device: torch.device) -> UncompiledReads:
    """The reader of parameters on the mesh ``name`` that belong to no backend. Its ranks call this first together."""
    axes = axes_named(name)
    known, reads = _OF_AXES.get(name, (None, None))
    if reads is None or known != axes:  # names of groups that were destroyed are used again
        group = axes.everyone
        rendezvous = None if backend_name(group, device) == "fake" else Rendezvous.open(group, device)
        reads = UncompiledReads(connect_axes(axes, device, rendezvous), (), StepCount({}), GradientAccumulation({}), 3)
        _OF_AXES[name] = (axes, reads)
    return reads


def _is_alone(group: str) -> bool:
    return not group or axes_named(group).everyone.size() == 1


for _function in (axes_named, _is_alone):
    skip_frame(_function)  # at a graph break Dynamo would compile it as a frame of its own


def _unshard(
    shard: Tensor, shape: Sequence[int], name: str, group: str, dtype: torch.dtype, reduce_dtype: torch.dtype,
    sharded: bool, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    shard = shard.to(device or shard.device)
    if not sharded or _is_alone(group):
        return shard.to(dtype=dtype, copy=True)  # an operator's result may not alias its input
    reads = reads_of(group, shard.device)
    dtypes = shard.dtype, dtype, reduce_dtype
    return reads.gather(param_on(group, reads.comm.world_size, name, shape, dtypes, sharded=sharded), shard, _WHOSE)


def _reduce_grad(
    grad: Tensor, shard_shape: Sequence[int], shard_dtype: torch.dtype, name: str, group: str, dtype: torch.dtype,
    reduce_dtype: torch.dtype, sharded: bool, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    if _is_alone(group):
        return grad.to(reduce_dtype, copy=True).to(device, shard_dtype)
    reads = reads_of(group, grad.device)
    dtypes = shard_dtype, dtype, reduce_dtype
    param = param_on(group, reads.comm.world_size, name, grad.shape, dtypes, sharded=sharded)
    return reads.reduce(param, grad, _WHOSE).to(device)


_WHOSE = "a graph of another backend"


for _name, _kernel in (("unshard", _unshard), ("reduce_grad", _reduce_grad)):
    torch.library.impl(f"zg::{_name}", "CompositeExplicitAutograd", _kernel)
    skip_frame(_kernel)
