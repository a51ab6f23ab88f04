"""Memory for full parameters, and the shapes of their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.core.plan import Param, ParamTile
from zerograph.runtime.torch_private import memory_is_unshared
from zerograph.sim.buffers import FreeBuffers

ALIGNMENT = 128
"""Bytes at which every full parameter starts: vector loads of any kernel, and of NCCL, are aligned."""


@dataclass(slots=True)
class Full:
    """Full parameters of one bucket in one allocation, each padded to equal chunks per rank.

    Rows are split as ``torch.chunk`` does, so only trailing chunks are short and the first ``shape[0]`` rows of the
    padded buffer are the parameter itself: a view, no copy.
    """

    padded: list[Tensor]
    tensors: list[Tensor]


class BufferPool:
    """Host memory for gathered buckets, used again once nothing reads it.

    The system hands out fresh memory page by page, each with a fault and zeros, and takes large blocks back when they
    are freed: a bucket of 16 MiB costs 4096 faults each time it is gathered. A buffer counts as free when no tensor
    shares its storage, so a view that somebody kept can never be overwritten.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, device="cpu")
    ) -> None:
        """``allocate`` makes new memory of so many bytes."""
        self._allocate = allocate
        self._taken: list[Tensor] = []
        self._free = FreeBuffers[Tensor]()

    @property
    def bytes(self) -> int:
        """In use, and free."""
        return sum(buffer.nbytes for buffer in (*self._taken, *self._free))

    def trim(self) -> None:
        """Let go of the free buffers."""
        self._find_free()
        self._free.clear()

    def take(self, size: int) -> Tensor:
        """Uninitialized memory of ``size`` bytes."""
        self._find_free()
        # What goes is gone before new memory is asked for.
        chosen = self._free.take(size)[0]
        if chosen is None:
            chosen = self._allocate(size)
        self._taken.append(chosen)
        return chosen[:size]

    def _find_free(self) -> None:
        taken = []
        for buffer in self._taken:
            if memory_is_unshared(buffer):
                self._free.add(buffer)
            else:
                taken.append(buffer)
        self._taken = taken


def allocate_full(params: Sequence[Param], device: torch.device, pool: BufferPool | None = None) -> Full:
    """Uninitialized memory for the full ``params``, out of ``pool`` if there is one (host memory only)."""
    offsets, end = [], 0
    for p in params:
        offsets.append(end)
        size = p.padded_elements * torch_dtype(p.compute_dtype).itemsize
        end += aligned(size)
    buffer = pool.take(end) if pool is not None else torch.empty(end, dtype=torch.uint8, device=device)
    padded = []
    for p, offset in zip(params, offsets, strict=True):
        dtype = torch_dtype(p.compute_dtype)
        padded.append(buffer[offset : offset + p.padded_elements * dtype.itemsize].view(dtype))
    tensors = [flat[: p.elements].view(p.shape) for p, flat in zip(params, padded, strict=True)]
    return Full(padded, tensors)


def aligned(size: int) -> int:
    """``size`` bytes and what it takes for the next tensor to start at a multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` as ``torch.bfloat16``."""
    return getattr(torch, name)  # type: ignore[no-any-return]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def tile_of(param: Param, shard: Tensor) -> Tensor:
    """The part of this rank's ``shard`` that belongs to ``param``: all, or the rows of a tile, those that there are."""
    return shard[param.begin : param.end] if isinstance(param, ParamTile) else shard


def add_to_tile(param: Param, shard: Tensor, tile: Tensor) -> None:
    """Add ``tile`` to what ``param`` has of this rank's ``shard``; rows that pad it are left out."""
    tile = tile.to(shard.device)
    if not isinstance(param, ParamTile):
        shard.add_(tile)
    else:
        rows = shard[param.begin : param.end]
        rows.add_(tile[: len(rows)])


def padded(param: Param, tile: Tensor) -> Tensor:
    """``tile``, as :func:`tile_of` gives it, with as many rows on every rank.

    Zeros pad it: products are computed of them, and what is left in memory may be NaN.
    """
    lacking = param.end - param.begin - len(tile) if isinstance(param, ParamTile) else 0
    return torch.cat([tile.detach(), tile.new_zeros(lacking, *tile.shape[1:])]) if lacking else tile
