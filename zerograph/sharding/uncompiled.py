"""Reading the full tensor of one parameter in a forward that is not compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph.core.errors import ShardingError
from zerograph.core.plan import Param
from zerograph.core.tracebacks import running_line
from zerograph.graph.ops import UNSHARD
from zerograph.runtime import delayed
from zerograph.runtime.dtensors import unfolded
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.sharding.markers import reads_of
from zerograph.sharding.parallel import Parallel
from zerograph.sharding.spec import ShardSpec


@torch.compiler.disable
def read_uncompiled(
    param: nn.Parameter, spec: ShardSpec, reads: UncompiledReads | None, parallel: Parallel | None = None
) -> Tensor:
    """The full tensor of ``param``, in ``spec.dtype``; its gradient arrives averaged over ranks, who all read it.

    Raises:
        ShardingError: it has no values.
        CollectiveMismatch: another rank reads another parameter, or runs a program; on all ranks.
    """
    if param.is_meta:
        raise ShardingError(
            f"parameter {spec.name} is on the meta device and has no values",
            "call zerograph.materialize(model) first; an init function may touch a module's own parameters only",
        )
    delayed.read_eagerly(param)
    if not isinstance(param, DTensor if spec.sharded and spec.group else nn.Parameter):
        return param  # swapped in by torch.func.functional_call or inside zerograph.gathered
    if parallel is not None and isinstance(param, DTensor) and param.device_mesh.ndim == parallel.mesh.ndim:
        return param
    local = param.to_local() if isinstance(param, DTensor) else param
    if not spec.group:
        return UNSHARD(local, list(param.shape), *spec.constants)
    if reads is None:  # the model came from a file
        reads = reads_of(spec.group, spec.device or local.device)
    described = spec.described(param, reads.comm.world_size, parallel)
    full = _Read.apply(local, described, spec.device, reads, running_line())
    return unfolded(full, param.shape if parallel is None else parallel.part, spec.dim)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(shard: Tensor, param: Param, device: torch.device | None, reads: UncompiledReads, line: str) -> Tensor:
        return reads.gather(param, shard.to(device or shard.device), line)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        shard, ctx.param, _, ctx.reads, ctx.line = inputs
        ctx.shard_device = shard.device

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.reads.reduce(ctx.param, grad, ctx.line).to(ctx.shard_device), None, None, None, None
