"""Messages of collectives: what lies in many tensors is cast, padded and put side by side in one launch, and sums that
came in them become means in one."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from zerograph.runtime.kernels.tables import TRITON_DTYPES, block_of, blocks, on, pointer, table

BLOCK = 2048
"""Elements of a program."""


def pack(tensors: Sequence[Tensor], lengths: Sequence[int], offsets: Sequence[int], message: Tensor) -> None:
    """Write the ``tensors`` into ``message``, cast to its dtype, with zeros behind what they have.

    Row ``r`` of the message has, from ``offsets[i]`` on, the ``lengths[i]`` elements of tensor ``i`` that begin at
    ``r * lengths[i]``. Elements in between stay as they are. A rank gives one row to a gather, and to a reduction a row
    for each rank.

    Args:
        tensors: contiguous, of one device.
        lengths, offsets: of each in a row.
        message: contiguous, ``[rows, elements]``.
    """
    rows, width = message.shape
    kinds = dict.fromkeys(t.dtype for t in tensors)
    for dtype in kinds:
        members = [i for i, t in enumerate(tensors) if t.dtype is dtype and lengths[i]]
        if not members or not rows:
            continue
        sizes = tuple(lengths[i] for i in members)
        numbers = [[tensors[i].numel() for i in members], sizes, [offsets[i] for i in members]]
        packed = table([[tensors[i].data_ptr() for i in members]], numbers, [], message.device)
        programs = blocks(sizes, BLOCK, message.device)
        # Vectors need every piece to begin at a multiple of 16 elements, in both the tensors and the message.
        pieces = (*numbers[2], message.data_ptr(), *((*sizes, width) if rows > 1 else ()))
        aligned = packed.aligned and all(piece % 16 == 0 for piece in pieces)
        with on(message.device):
            _pack[(len(programs), rows)](
                packed.columns, programs, message, len(members), width, TRITON_DTYPES[dtype], aligned, BLOCK
            )


def divide(sums: Sequence[Tensor], number: int, outs: Sequence[Tensor]) -> None:
    """Write each of ``sums``, divided by ``number``, into its place of ``outs``: rounded to its own dtype, and then to
    that of the place. One launch for each pair of dtypes.

    Args:
        sums: contiguous, of one device.
        outs: contiguous, each with as many elements.
    """
    kinds = [(total.dtype, out.dtype) for total, out in zip(sums, outs, strict=True)]
    for kind in dict.fromkeys(kinds):
        members = [i for i, total in enumerate(sums) if kinds[i] == kind and total.numel()]
        if not members:
            continue
        device, sizes = sums[members[0]].device, tuple(sums[i].numel() for i in members)
        addresses = [[tensors[i].data_ptr() for i in members] for tensors in (sums, outs)]
        divided, programs = table(addresses, [sizes], [], device), blocks(sizes, BLOCK, device)
        dtypes = [TRITON_DTYPES[dtype] for dtype in kind]
        with on(device):
            _divide[(len(programs),)](
                divided.columns, programs, len(members), float(number), *dtypes, divided.aligned, BLOCK
            )


@triton.jit(do_not_specialize=["count", "width"])
def _pack(
    columns: tl.tensor,
    programs: tl.tensor,
    message: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    owner, first = block_of(programs, BLOCK)
    size, length = tl.load(columns + count + owner), tl.load(columns + 2 * count + owner)
    skipped = row * length
    source = pointer(columns, owner, DTYPE, ALIGNED) + skipped
    into = message + row * width + tl.load(columns + 3 * count + owner)
    if ALIGNED:
        source, into = tl.multiple_of(source, 16), tl.multiple_of(into, 16)
    at = first + tl.arange(0, BLOCK)
    # Without a mask threads load vectors.
    if first + BLOCK <= tl.minimum(length, size - skipped):
        tl.store(into + at, tl.load(source + at).to(message.dtype.element_ty))
    else:
        value = tl.load(source + at, mask=(at < length) & (skipped + at < size), other=0.0)
        tl.store(into + at, value.to(message.dtype.element_ty), mask=at < length)


@triton.jit(do_not_specialize=["count"])
def _divide(
    columns: tl.tensor,
    programs: tl.tensor,
    count: tl.tensor,
    number: tl.tensor,
    SUM: tl.constexpr,
    OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    owner, first = block_of(programs, BLOCK)
    size = tl.load(columns + 2 * count + owner)
    source, into = pointer(columns, owner, SUM, ALIGNED), pointer(columns, count + owner, OUT, ALIGNED)
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= size:
        mean = tl.div_rn(tl.load(source + at).to(tl.float32), number)
        tl.store(into + at, mean.to(SUM).to(OUT))
    else:
        mean = tl.div_rn(tl.load(source + at, mask=at < size, other=0.0).to(tl.float32), number)
        tl.store(into + at, mean.to(SUM).to(OUT), mask=at < size)
