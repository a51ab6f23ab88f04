"""How one launch works on a list of tensors: a table of their addresses, and one of which block each program has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_VECTOR = 16
"""Bytes that a thread loads at once, where everything is aligned to them."""

TRITON_DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches inside of it go to ``device``, whichever is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class NumberTable(NamedTuple):
    """Numbers of each tensor of a list, on the device.

    Attributes:
        columns: int64 ``[columns, tensors]``.
        shared: float64, numbers that all tensors share.
        aligned: every address is a multiple of 16 bytes, so that threads may load vectors.
    """

    columns: Tensor
    shared: Tensor
    aligned: bool


def table(
    addresses: Sequence[Sequence[int]], numbers: Sequence[Sequence[int]], shared: Sequence[float], device: torch.device
) -> NumberTable:
    """The table, on ``device``: what is in its columns is copied there when it is first asked for in a stream, and the
    shared numbers each time.

    Args:
        addresses: columns, each with one address for each tensor; 0 where a tensor has none.
        numbers: further columns.
        shared: numbers that all tensors share.
        device: where the kernels run.
    """
    of_addresses, of_numbers = tuple(map(tuple, addresses)), tuple(map(tuple, numbers))
    columns, aligned = _columns(of_addresses, of_numbers, device, _stream(device))
    return NumberTable(columns, _sent(torch.tensor(shared, dtype=torch.float64, device="cpu"), device), aligned)


# In training the same tensors, or others in the memory that these had, are worked on in each step. What one stream has
# copied another one may not find yet.
_KEPT = 1024
_Columns = tuple[tuple[int, ...], ...]


@functools.lru_cache(_KEPT)
def _columns(addresses: _Columns, numbers: _Columns, device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """The columns of a table, and whether the addresses are aligned."""
    aligned = not any(address % _VECTOR for column in addresses for address in column)
    return _sent(torch.tensor((*addresses, *numbers), dtype=torch.int64, device="cpu"), device), aligned


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """``numbers`` on ``device``, for which nobody waits."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()  # torch uses it again only once the copy has ended
    return numbers.to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    return torch.accelerator.current_stream(device).stream_id if device.type == "cuda" else 0


def blocks(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """Which elements each program has: int32 ``[programs, 2]``, the tensor and the number of the block in it.

    Args:
        sizes: elements of each tensor; one of none has no program.
        block: elements of a program.
        device: where the kernels run.
    """
    return _blocks(sizes, block, device, _stream(device))


@functools.lru_cache(_KEPT)
def _blocks(sizes: tuple[int, ...], block: int, device: torch.device, stream: int) -> Tensor:
    counts = torch.tensor([-(-size // block) for size in sizes], dtype=torch.int64, device="cpu")
    owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    numbers = torch.arange(owners.numel(), device="cpu") - (counts.cumsum(0) - counts)[owners]
    return torch.stack([owners, numbers], dim=1).to(torch.int32).to(device)


@triton.jit
def pointer(columns: tl.tensor, place: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """In a kernel: the address in ``place`` of the table, as a pointer to ``DTYPE``."""
    found = tl.load(columns + place).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # the compiler sees it of pointers, and not of the numbers that became them
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def block_of(programs: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """In a kernel: the tensor of this program, and its first element there."""
    program = tl.program_id(0)
    return tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1).to(tl.int64) * BLOCK
