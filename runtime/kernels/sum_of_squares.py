"""The sum of squares of a list of tensors: each program adds up its block, and one program adds up those.

Nothing is added atomically, so that every run gives the same bits for tensors at equally aligned addresses. Squares and
sums are float64: large gradients do not overflow, as on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerograph.runtime.kernels.tables import TRITON_DTYPES, block_of, blocks, on, pointer, table

BLOCK = 1024
"""Elements that a program adds up at once."""

ROUNDS = 16
"""How often it does."""

PARTIAL = 4096
"""Sums of programs that the last one adds up at once."""


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares over all elements of dense ``tensors``, of one device; NaN and infinities are carried.

    Returns:
        A 0-d tensor of float64 on their device. Nothing waits for it.
    """
    device = tensors[0].device
    kinds = [[t for t in tensors if t.dtype is dtype and t.numel()] for dtype in TRITON_DTYPES]
    plans = [blocks(tuple(map(Tensor.numel, kind)), BLOCK * ROUNDS, device) for kind in kinds]
    partial = torch.empty(sum(map(len, plans)), dtype=torch.float64, device=device)
    begin = 0
    for kind, programs in zip(kinds, plans, strict=True):
        if not kind:
            continue
        packed = table([[t.data_ptr() for t in kind]], [[t.numel() for t in kind]], [], device)
        out = partial[begin : begin + len(programs)]
        dtype = TRITON_DTYPES[kind[0].dtype]
        with on(device):
            _add_blocks[(len(programs),)](
                packed.columns, programs, out, len(kind), dtype, packed.aligned, BLOCK, ROUNDS
            )
        begin += len(programs)
    total = torch.empty((), dtype=torch.float64, device=device)
    with on(device):
        _add_partial[(1,)](partial, total, len(partial), PARTIAL, num_warps=8)
    return total


@triton.jit(do_not_specialize=["count"])
def _add_blocks(
    columns: tl.tensor,
    programs: tl.tensor,
    partial: tl.tensor,
    count: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    owner, first = block_of(programs, BLOCK * ROUNDS)
    size = tl.load(columns + count + owner)
    begin = pointer(columns, owner, DTYPE, ALIGNED)
    lanes = tl.zeros([BLOCK], dtype=tl.float64)
    # Without a mask threads load vectors.
    if first + BLOCK * ROUNDS <= size:
        for i in range(ROUNDS):
            value = tl.load(begin + first + i * BLOCK + tl.arange(0, BLOCK)).to(tl.float64)
            lanes += value * value
    else:
        for i in range(ROUNDS):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(begin + at, mask=at < size, other=0.0).to(tl.float64)
            lanes += value * value
    tl.store(partial + tl.program_id(0), tl.sum(lanes))


@triton.jit(do_not_specialize=["count"])
def _add_partial(partial: tl.tensor, total: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    lanes = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        lanes += tl.load(partial + at, mask=at < count, other=0.0)
    tl.store(total, tl.sum(lanes))
