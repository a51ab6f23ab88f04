"""Memory for full parameters, and the shapes of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.plan import Param

ALIGNMENT = 128
"""Bytes at which every full parameter starts: vector loads of any kernel, and of NCCL, are aligned."""


@dataclass(slots=True)
class Full:
    """Full parameters of one bucket in one allocation, each padded to equal chunks per rank.

    Rows are split as ``torch.chunk`` does, so only trailing chunks are short and the first ``shape[0]`` rows of the
    padded buffer are the parameter itself: a view, no copy.
    """

    buffer: Tensor
    padded: list[Tensor]
    tensors: list[Tensor]


def allocate_full(params: Sequence[Param], world_size: int, device: torch.device) -> Full:
    """Uninitialized memory for the full ``params``."""
    offsets, end = [], 0
    for p in params:
        offsets.append(end)
        size = world_size * p.chunk_elements(world_size) * torch_dtype(p.compute_dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    padded = []
    for p, offset in zip(params, offsets, strict=True):
        dtype = torch_dtype(p.compute_dtype)
        count = world_size * p.chunk_elements(world_size)
        padded.append(buffer[offset : offset + count * dtype.itemsize].view(dtype))
    tensors = [flat[: p.elements].view(p.shape) for p, flat in zip(params, padded, strict=True)]
    return Full(buffer, padded, tensors)


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` as ``torch.bfloat16``."""
    return getattr(torch, name)  # type: ignore[no-any-return]


def shard_shape(param: Param, rank: int, world_size: int) -> tuple[int, ...]:
    """Shape of what ``rank`` holds of ``param``."""
    if not param.sharded:
        return param.shape
    first, last = param.shard_rows(rank, world_size)
    return (last - first, *param.shape[1:])
