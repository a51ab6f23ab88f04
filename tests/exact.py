"""Values of parameters for collectives whose results are known to the bit, and what transports are called."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from zerograph.core.step import Param

TWO_LEVELS = "shared memory in each of 2 hosts, between them torch.distributed (gloo)"


def values(param: Param, rank: int = 0, divisor: int = 1) -> Tensor:
    """Whole numbers, whose sums over ranks and their halves and quarters are exact in all dtypes, over ``divisor``."""
    seed = torch.Generator().manual_seed(zlib.crc32(param.name.encode()) + rank)
    return torch.randint(-8, 8, param.shape, generator=seed).to(torch.float32) / divisor


def rows(param: Param, full: Tensor, rank: int) -> Tensor:
    """The part of ``full`` that ``rank`` has at home."""
    return full[param.shard_rows(rank)] if param.sharded else full


def tolerance(param: Param) -> float:
    """The most that a mean of values below 8, summed over a few ranks in any order, is off."""
    bits = {"float64": 52, "float32": 21}.get(param.reduce_dtype if param.dtype != "bfloat16" else "bfloat16", 6)
    return 8 * 2.0**-bits
