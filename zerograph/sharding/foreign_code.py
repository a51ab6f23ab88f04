"""Other code that takes sharded parameters for plain tensors: our errors, with the line to write, before torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zerograph.core.errors import UnsupportedError
from zerograph.sharding.adopt import wrapped_by
from zerograph.sharding.module_classes import specs_of
from zerograph.sharding.torch_private import answer_op, before_wrapping


def explain_shards() -> None:
    """From now on have errors of ours where other code meets shards. Idempotent; for the whole process."""
    c10d = torch.ops.c10d
    for op in (c10d.broadcast_, c10d.allreduce_, c10d.allreduce_coalesced_, c10d.reduce_):
        answer_op(op.default, _refuse_collective)
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        before_wrapping(wrapper, _refuse_wrapper)


def _refuse_collective(op: Any, *_: Any) -> None:
    """Loops that average gradients by hand call these with parameters."""
    raise UnsupportedError(
        f"a collective of torch.distributed ({op}) got a DTensor, of which each rank holds its own rows",
        "leave out what synchronizes ranks: ZeroGraph starts all from rank 0's values and averages gradients; "
        "param.to_local() is this rank's part",
    )


def _refuse_wrapper(wrapper: type[nn.Module], model: nn.Module) -> None:
    shards = {id(param) for *_, param in specs_of([model]) if isinstance(param, DTensor)}
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # how DDP is told, before it is made
    if any(id(p) in shards and name not in ignored for name, p in model.named_parameters()):
        raise wrapped_by(wrapper)
