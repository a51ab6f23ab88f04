"""The rows of a matrix to and from fewer bits, or to the sum of them, in one launch: messages as in ``csrc/wire.h``.

Bits are those of the native kernels (csrc/wire_target.cc). All rounding is arithmetic of float32 and of integers, and
nothing asks the hardware to convert: e4m3 only GPUs from sm_89 on can, and none 4 bits. Of a block with a NaN all give
NaN back; its scale is one NaN here, and there the one that came.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zerograph.core.step import WIRE_BITS, WIRE_BLOCK, WIRE_MOST
from zerograph.runtime.kernels.tables import TRITON_DTYPES, on

BLOCKS = 8
"""Blocks of a program: each thread has 16 elements."""


def encode(wire: str, values: Tensor, message: Tensor) -> None:
    """Write each row of ``values`` as ``wire`` sends it.

    Args:
        wire: one of less than 16 bits.
        values: ``[rows, elements]`` of float32, bfloat16 or float16, each row contiguous.
        message: ``[rows, wire_bytes(wire, elements)]`` bytes, likewise, each row at a multiple of 4.
    """
    _launch(_encode, wire, values, message)


def decode(wire: str, message: Tensor, out: Tensor) -> None:
    """Write the elements of each row of ``message`` into a row of ``out``, in the dtype of that; shapes as for
    :func:`encode`."""
    _launch(_decode, wire, out, message)


def add_up(wire: str, messages: Tensor, elements: int, out: Tensor, scale: float) -> None:
    """Write the sum of what the rows of ``messages`` decode to, one after the other in float32, times ``scale``.

    Args:
        wire: that :func:`encode` writes, or "bf16".
        messages: ``[senders, wire_bytes(wire, elements)]`` bytes, each row contiguous and at a multiple of 4.
        elements: of a row.
        out: contiguous, the first of these, in a dtype of its own.
        scale: of the sum.
    """
    count = out.numel()
    if not count:
        return
    aligned = _aligned(out.unsqueeze(0)) and _aligned(messages)
    with on(out.device):
        _add_up[(triton.cdiv(count, BLOCKS * WIRE_BLOCK),)](
            out,
            messages,
            count,
            *_places_in(wire, elements, messages),
            messages.stride(0),
            len(messages),
            scale,
            TRITON_DTYPES[out.dtype],
            wire,
            aligned,
            BLOCKS,
            WIRE_BLOCK,
            enable_fp_fusion=False,  # or a term would not be rounded before it is added
        )


def _launch(kernel: triton.JITFunction, wire: str, elements: Tensor, message: Tensor) -> None:
    rows, count = elements.shape
    if not elements.numel():
        return
    with on(elements.device):
        kernel[(triton.cdiv(count, BLOCKS * WIRE_BLOCK), rows)](
            elements,
            message,
            count,
            *_places_in(wire, count, message),
            elements.stride(0),
            message.stride(0),
            TRITON_DTYPES[elements.dtype],
            wire,
            WIRE_MOST.get(wire),
            _aligned(elements) and _aligned(message),
            BLOCKS,
            WIRE_BLOCK,
        )


def _places_in(wire: str, count: int, message: Tensor) -> tuple[int, int]:
    """Where the codes of ``count`` elements end in a row, and where their scales begin."""
    return -(-count * WIRE_BITS[wire] // 8), message.shape[1] - 4 * -(-count // WIRE_BLOCK)


def _aligned(rows: Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes, so that threads may load vectors."""
    return rows.data_ptr() % 16 == 0 and (len(rows) == 1 or rows.stride(0) * rows.itemsize % 16 == 0)


@triton.jit
def _rows(
    elements: tl.tensor, message: tl.tensor, stride: tl.tensor, width: tl.tensor, ALIGNED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where the row of this program begins, in both."""
    row = tl.program_id(1).to(tl.int64)
    elements, message = elements + row * stride, message + row * width
    if ALIGNED:
        elements, message = tl.multiple_of(elements, 16), tl.multiple_of(message, 16)
    return elements, message


@triton.jit
def _places(per: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Where in a program's elements, or in its bytes of ``per`` elements each, those of its blocks lie."""
    return tl.arange(0, BLOCKS)[:, None] * (BLOCK // per) + tl.arange(0, BLOCK // per)[None, :]


@triton.jit(do_not_specialize=["count", "payload", "scales_at", "stride", "width"])
def _encode(
    values: tl.tensor,
    message: tl.tensor,
    count: tl.tensor,
    payload: tl.tensor,
    scales_at: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    DTYPE: tl.constexpr,
    WIRE: tl.constexpr,
    MOST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    values, message = _rows(values, message, stride, width, ALIGNED)
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    # Full blocks need no mask, and only without one do threads load vectors.
    if first + BLOCKS * BLOCK <= count:
        _encode_blocks(values, message, count, payload, scales_at, first, WIRE, MOST, False, BLOCKS, BLOCK)
    else:
        _encode_blocks(values, message, count, payload, scales_at, first, WIRE, MOST, True, BLOCKS, BLOCK)


@triton.jit
def _encode_blocks(
    values: tl.tensor, message: tl.tensor, count: tl.tensor, payload: tl.tensor, scales_at: tl.tensor, first: tl.tensor,
    WIRE: tl.constexpr, MOST: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    per: tl.constexpr = 8 if WIRE == "sign" else (2 if WIRE == "int4" else 1)  # elements of a byte
    at = first + _places(1, BLOCKS, BLOCK)
    if MASKED:
        value = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)
    else:
        value = tl.load(values + at).to(tl.float32)
    if WIRE == "sign":
        scale = _means(values, count, first, MASKED, BLOCKS, BLOCK)
        bits = tl.reshape((value >= 0.0).to(tl.int32), (BLOCKS, BLOCK // 8, 8))
        code = tl.sum(bits << tl.arange(0, 8)[None, None, :], axis=2)
    else:
        scale, scaled = _scaled(value, MOST)
        if WIRE == "fp8":
            code = _to_fp8(scaled)
        elif WIRE == "int8":
            code = _rounded(scaled)
        else:
            low, high = tl.split(tl.reshape(_rounded(scaled) + 8, (BLOCKS, BLOCK // 2, 2)))
            code = low | (high << 4)
    code = (code & 255).to(tl.uint8)
    into = first // per + _places(per, BLOCKS, BLOCK)
    number = first // BLOCK + tl.arange(0, BLOCKS)
    scales = (message + scales_at).to(tl.pointer_type(tl.float32)) + number
    if MASKED:
        tl.store(message + into, tl.where(into < payload, code, 0), mask=into < scales_at)
        tl.store(scales, scale, mask=number * BLOCK < count)
    else:
        tl.store(message + into, code)
        tl.store(scales, scale)


@triton.jit
def _scaled(value: tl.tensor, MOST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The scale of each block, and its elements in the range of the format; zeros where one is not finite."""
    most = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # infinities and NaN are the largest
    scale = tl.div_rn(most.to(tl.float32, bitcast=True), MOST)
    # A normal number at least, so that no quotient overflows.
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = tl.where(most > 0x7F800000, float("nan"), scale)
    finite = most < 0x7F800000
    return scale, tl.div_rn(tl.where(finite[:, None], value, 0.0), tl.where(finite, scale, 1.0)[:, None])


@triton.jit
def _means(
    values: tl.tensor, count: tl.tensor, first: tl.tensor,
    MASKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The mean magnitude of each block, summed in the native kernels' order: 16 lanes, and then halves of these."""
    at = first + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, 16)[None, :]
    sums = tl.zeros([BLOCKS, 16], dtype=tl.float32)
    for step in tl.static_range(BLOCK // 16):
        if MASKED:
            value = tl.load(values + at + step * 16, mask=at + step * 16 < count, other=0.0)
        else:
            value = tl.load(values + at + step * 16)
        sums += tl.abs(value.to(tl.float32))
    sums = _halved(_halved(_halved(_halved(sums, 8, BLOCKS), 4, BLOCKS), 2, BLOCKS), 1, BLOCKS)
    counts = tl.minimum(tl.maximum(count - first - tl.arange(0, BLOCKS) * BLOCK, 1), BLOCK)
    mean = tl.div_rn(tl.reshape(sums, (BLOCKS,)), counts.to(tl.float32))
    return tl.where(mean != mean, float("nan"), mean)


@triton.jit
def _halved(sums: tl.tensor, HALF: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    one, other = tl.split(tl.permute(tl.reshape(sums, (BLOCKS, 2, HALF)), (0, 2, 1)))
    return one + other


@triton.jit
def _rounded(value: tl.tensor) -> tl.tensor:
    """The nearest integer, ties to even: the sum with 1.5 * 2**23 has it in its low bits."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _to_fp8(value: tl.tensor) -> tl.tensor:
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 2**14 aligns the mantissa to 2**-9, the step of subnormals, and the addition rounds to nearest even.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return ((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, small, normal)


@triton.jit(do_not_specialize=["count", "payload", "scales_at", "stride", "width"])
def _decode(
    out: tl.tensor,
    message: tl.tensor,
    count: tl.tensor,
    payload: tl.tensor,
    scales_at: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    DTYPE: tl.constexpr,
    WIRE: tl.constexpr,
    MOST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    out, message = _rows(out, message, stride, width, ALIGNED)
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    if first + BLOCKS * BLOCK <= count:
        _decode_blocks(out, message, count, payload, scales_at, first, DTYPE, WIRE, False, BLOCKS, BLOCK)
    else:
        _decode_blocks(out, message, count, payload, scales_at, first, DTYPE, WIRE, True, BLOCKS, BLOCK)


@triton.jit
def _decode_blocks(
    out: tl.tensor, message: tl.tensor, count: tl.tensor, payload: tl.tensor, scales_at: tl.tensor, first: tl.tensor,
    DTYPE: tl.constexpr, WIRE: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    value = _decoded(message, count, payload, scales_at, first, WIRE, MASKED, BLOCKS, BLOCK).to(DTYPE)
    at = first + _places(1, BLOCKS, BLOCK)
    if MASKED:
        tl.store(out + at, value, mask=at < count)
    else:
        tl.store(out + at, value)


@triton.jit(do_not_specialize=["count", "payload", "scales_at", "width", "senders"])
def _add_up(
    out: tl.tensor,
    messages: tl.tensor,
    count: tl.tensor,
    payload: tl.tensor,
    scales_at: tl.tensor,
    width: tl.tensor,
    senders: tl.tensor,
    scale: tl.tensor,
    DTYPE: tl.constexpr,
    WIRE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if ALIGNED:
        out, messages = tl.multiple_of(out, 16), tl.multiple_of(messages, 16)
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    if first + BLOCKS * BLOCK <= count:
        _add_up_blocks(
            out, messages, count, payload, scales_at, width, senders, scale, first,
            DTYPE, WIRE, ALIGNED, False, BLOCKS, BLOCK,
        )  # fmt: skip
    else:
        _add_up_blocks(
            out, messages, count, payload, scales_at, width, senders, scale, first,
            DTYPE, WIRE, ALIGNED, True, BLOCKS, BLOCK,
        )  # fmt: skip


@triton.jit
def _add_up_blocks(
    out: tl.tensor, messages: tl.tensor, count: tl.tensor, payload: tl.tensor, scales_at: tl.tensor, width: tl.tensor,
    senders: tl.tensor, scale: tl.tensor, first: tl.tensor,
    DTYPE: tl.constexpr, WIRE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    total = _decoded(messages, count, payload, scales_at, first, WIRE, MASKED, BLOCKS, BLOCK)
    for _ in range(1, senders):
        messages += width
        if ALIGNED:
            messages = tl.multiple_of(messages, 16)
        total += _decoded(messages, count, payload, scales_at, first, WIRE, MASKED, BLOCKS, BLOCK)
    at = first + _places(1, BLOCKS, BLOCK)
    if MASKED:
        tl.store(out + at, (total * scale).to(DTYPE), mask=at < count)
    else:
        tl.store(out + at, (total * scale).to(DTYPE))


@triton.jit
def _decoded(
    message: tl.tensor, count: tl.tensor, payload: tl.tensor, scales_at: tl.tensor, first: tl.tensor,
    WIRE: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The elements of this program in float32; those behind ``count`` are any."""
    at = first + _places(1, BLOCKS, BLOCK)
    if WIRE == "bf16":
        elements = message.to(tl.pointer_type(tl.bfloat16)) + at
        if MASKED:
            value = tl.load(elements, mask=at < count, other=0.0).to(tl.float32)
        else:
            value = tl.load(elements).to(tl.float32)
    else:
        value = _scaled_back(message, count, payload, scales_at, first, WIRE, MASKED, BLOCKS, BLOCK)
    return value


@triton.jit
def _scaled_back(
    message: tl.tensor, count: tl.tensor, payload: tl.tensor, scales_at: tl.tensor, first: tl.tensor,
    WIRE: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    per: tl.constexpr = 8 if WIRE == "sign" else (2 if WIRE == "int4" else 1)  # elements of a byte
    source = first // per + _places(per, BLOCKS, BLOCK)
    number = first // BLOCK + tl.arange(0, BLOCKS)
    scales = (message + scales_at).to(tl.pointer_type(tl.float32)) + number
    if MASKED:
        code = tl.load(message + source, mask=source < payload, other=0).to(tl.int32)
        scale = tl.load(scales, mask=number * BLOCK < count, other=0.0)
    else:
        code, scale = tl.load(message + source).to(tl.int32), tl.load(scales)
    if WIRE == "fp8":
        value = _from_fp8(code)
    elif WIRE == "int8":
        value = ((code << 24) >> 24).to(tl.float32)
    elif WIRE == "int4":
        value = tl.reshape(tl.join(code & 15, code >> 4) - 8, (BLOCKS, BLOCK)).to(tl.float32)
    else:
        bits = (code[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        value = tl.reshape(bits * 2 - 1, (BLOCKS, BLOCK)).to(tl.float32)
    finite = scale.to(tl.uint32, bitcast=True) < 0x7F800000
    return value * tl.where(finite, scale, float("nan"))[:, None]


@triton.jit
def _from_fp8(code: tl.tensor) -> tl.tensor:
    # Shift exponent and mantissa into place and correct the bias by a multiplication, exact for subnormals too.
    magnitude = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return (magnitude.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
