"""The ``zg::`` operators: all that passes and runtime share.

``unshard`` and ``reduce_grad`` are the *markers* that Dynamo records and AOTAutograd carries into the joint graph; both
also run eagerly (``zerograph/sharding/markers.py``), so that code outside a compiled region is slower and never wrong.
The others stand for instructions: passes insert them in place of markers, and lowering turns them into a program. They
are never dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIB = torch.library.Library("zg", "DEF")


def _operator(schema: str) -> Any:
    _LIB.define(schema)
    return getattr(torch.ops.zg, schema.partition("(")[0]).default


# The device of the result, where it is another one than the argument's: shards may live on the host.
_SPEC = "str name, str group, ScalarType dtype, ScalarType reduce_dtype, bool sharded, Device? device=None"
UNSHARD = _operator(f"unshard(Tensor shard, int[] shape, {_SPEC}) -> Tensor")
REDUCE_GRAD = _operator(f"reduce_grad(Tensor grad, int[] shard_shape, ScalarType shard_dtype, {_SPEC}) -> Tensor")
# Those that move a bucket may move a tile of it.
GATHER = _operator("gather(Tensor[] shards, int bucket, int tile=0) -> Tensor")
WAIT_GATHER = _operator("wait_gather(Tensor pending, Tensor[] shards, int bucket, int tile=0) -> Tensor[]")
FREE = _operator("free(Tensor[] gathered, int bucket, int tile=0) -> ()")
FETCH = _operator("fetch(Tensor[] shards, int bucket, int tile=0) -> Tensor")
WAIT_FETCH = _operator("wait_fetch(Tensor pending, Tensor[] shards, int bucket, int tile=0) -> Tensor[]")
REDUCE = _operator("reduce(Tensor[] grads, int bucket, int tile=0) -> Tensor")
WAIT_REDUCE = _operator("wait_reduce(Tensor pending, Tensor[] grads, int bucket, int tile=0) -> Tensor[]")
SPILL = _operator("spill(Tensor[] grads, int bucket, Tensor? into=None) -> Tensor[]")
SPILL_SAVED = _operator("spill_saved(Tensor[] saved) -> Tensor[]")
FETCH_SAVED = _operator("fetch_saved(Tensor[] offloaded) -> Tensor")
WAIT_FETCH_SAVED = _operator("wait_fetch_saved(Tensor pending, Tensor[] offloaded) -> Tensor[]")
# Tiles: a part of a tensor, a tile put in its place, and one added, or the product of two, to the sum of those before.
VIEW = _operator("view(Tensor(a) source, int dim, int begin, int end) -> Tensor(a)")
PLACE = _operator("place(Tensor[] terms, Tensor? into, int[] shape, int dim, int begin) -> Tensor")
ACCUMULATE = _operator("accumulate(Tensor[] terms, Tensor? into) -> Tensor")
# The product with a number, in the memory of ``source`` where nobody else has that.
SCALE = _operator("scale(Tensor source, Tensor by) -> Tensor")


def _unshard_fake(
    shard: Tensor, shape: Sequence[int], name: str, group: str, dtype: torch.dtype, reduce_dtype: torch.dtype,
    sharded: bool, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    return shard.new_empty(shape, dtype=dtype, device=device)


def _reduce_grad_fake(
    grad: Tensor, shard_shape: Sequence[int], shard_dtype: torch.dtype, name: str, group: str, dtype: torch.dtype,
    reduce_dtype: torch.dtype, sharded: bool, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    return grad.new_empty(shard_shape, dtype=shard_dtype, device=device)


def _pending_fake(tensors: Sequence[Tensor], bucket: int, tile: int = 0) -> Tensor:
    return tensors[0].new_empty(0)


for _name, _fake in (("unshard", _unshard_fake), ("reduce_grad", _reduce_grad_fake)):
    torch.library.register_fake(f"zg::{_name}", _fake, lib=_LIB)
for _name in ("gather", "fetch", "reduce"):
    torch.library.register_fake(f"zg::{_name}", _pending_fake, lib=_LIB)


def _save_shard(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    shard, _, *ctx.spec, device = inputs
    ctx.shard_shape, ctx.shard_dtype = list(shard.shape), shard.dtype
    ctx.shard_device = shard.device if device else None


def _unshard_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    shard_grad = REDUCE_GRAD(grad, ctx.shard_shape, ctx.shard_dtype, *ctx.spec, ctx.shard_device)
    return (shard_grad, *[None] * 7)


torch.library.register_autograd("zg::unshard", _unshard_backward, setup_context=_save_shard, lib=_LIB)

INSTRUCTIONS = frozenset({GATHER, WAIT_GATHER, FREE, REDUCE, WAIT_REDUCE, FETCH, WAIT_FETCH, SPILL})
INSTRUCTIONS |= {SPILL_SAVED, FETCH_SAVED, WAIT_FETCH_SAVED, VIEW, PLACE, ACCUMULATE, SCALE}
