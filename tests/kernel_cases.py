"""Properties of the Triton kernels, on any device: interpreted on a CPU (tests/runtime/kernels), compiled on a GPU
(tests/gpu). Each runs a kernel twice, which must give the same bits, and compares it with a reference in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_names import NAMES
from quick import examples
from torch import Tensor
from torch.nn.functional import pad

from zerograph.core.step import WIRE_BLOCK, WIRE_MOST, wire_bytes
from zerograph.runtime.comm.wires import decode as decode_natively
from zerograph.runtime.comm.wires import encode as encode_natively
from zerograph.runtime.kernels import adamw, messages, sum_of_squares, wires

WIDE, NARROW, HALF = torch.float32, torch.bfloat16, torch.float16
DTYPES = st.sampled_from([WIDE, NARROW, HALF])
POISON = st.sampled_from([None, None, None, math.nan, math.inf, -math.inf])
SEEDS = st.integers(0, 2**32 - 1)
EPSILON = {WIDE: 1e-6, NARROW: 2.0**-7, HALF: 2.0**-10}
"""Relative: of low precision one digit, which two roundings of nearly the same number may differ by."""

_settings = settings(max_examples=examples(40), deadline=None, database=None, suppress_health_check=list(HealthCheck))


def lists(block: int) -> st.SearchStrategy[list[int]]:
    """Sizes of tensors around multiples of ``block``, and empty ones."""
    around = [0, 1, 7, 33, block - 1, block, block + 1, 2 * block + 5]
    return st.lists(st.sampled_from(around), min_size=1, max_size=5)


def tensor(size: int, dtype: torch.dtype, device: str, shift: int = 0, scale: float = 1.0) -> Tensor:
    """Of random numbers, ``shift`` elements behind an aligned address."""
    return (torch.randn(size + shift) * scale).to(device, dtype)[shift:]


def poisoned(tensors: Sequence[Tensor], value: float | None) -> None:
    """Put ``value`` into the middle of the largest tensor."""
    largest = max(tensors, key=Tensor.numel)
    if value is not None and largest.numel():
        largest[largest.numel() // 2] = value


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Whether ``found`` is ``wanted`` but for rounding to ``dtype``, of numbers about as large as ``scale``."""
    bound = EPSILON[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=bound, atol=bound * scale, equal_nan=True)


def same(found: Tensor, again: Tensor) -> None:
    """Whether two runs gave the same bits."""
    torch.testing.assert_close(found, again, rtol=0, atol=0, equal_nan=True)


@_settings
@given(data=st.data(), seed=SEEDS, sizes=lists(adamw.BLOCK), shift=st.sampled_from([0, 0, 1, 3]), poison=POISON)
def adamw_of_lists(device: str, data: st.DataObject, seed: int, sizes: list[int], shift: int, poison: Any) -> None:
    torch.manual_seed(seed)
    param, moment = data.draw(st.sampled_from([(WIDE, WIDE), (WIDE, WIDE), (WIDE, NARROW), (NARROW, WIDE)]))
    out = data.draw(st.sampled_from([None, NARROW, HALF]))
    rule = adamw.Rule(
        lr=data.draw(st.sampled_from([1e-3, torch.tensor(0.01, device=device)])),
        beta1=data.draw(st.sampled_from([0.9, 0.3, 0.0])),
        beta2=data.draw(st.sampled_from([0.999, 0.95])),
        eps=1e-8,
        weight_decay=data.draw(st.sampled_from([0.0, 0.1])),
        decoupled=data.draw(st.booleans()),
        maximize=data.draw(st.booleans()),
    )
    squares, largest = ([tensor(n, moment, device, shift).square_() for n in sizes] for _ in range(2))
    tensors = adamw.Tensors(
        [tensor(n, param, device, shift) for n in sizes],
        [tensor(n, data.draw(DTYPES, label="grad"), device) for n in sizes[:1]],
        [tensor(n, moment, device, shift) for n in sizes],
        squares,
        [torch.tensor(float(data.draw(st.integers(0, 1000))), device=device) for _ in sizes],
        largest if data.draw(st.booleans()) else (),
        [tensor(n, out, device, shift) for n in sizes] if out is not None else (),
    )
    tensors.grads.extend(tensor(n, tensors.grads[0].dtype, device) for n in sizes[1:])  # type: ignore[attr-defined]
    poisoned(tensors.grads, poison)
    factor = data.draw(st.sampled_from([1.0, 0.37, torch.tensor(0.37, device=device)]))
    nonfinite = data.draw(st.sampled_from([None, torch.zeros(1, device=device), torch.ones((), device=device)]))
    again, wanted = copy.deepcopy(tensors), copy.deepcopy(tensors)
    adamw.update(tensors, rule, factor, nonfinite)
    adamw.update(again, rule, factor, nonfinite)
    reference_update(wanted, rule, factor, nonfinite)
    for name in ("params", "grads", "averages", "squares", "steps", "largest", "copies"):
        for found, other, right in zip(*(getattr(t, name) for t in (tensors, again, wanted)), strict=True):
            same(found, other)
            near(found, right, found.dtype)


@_settings
@given(
    data=st.data(),
    seed=SEEDS,
    sizes=lists(sum_of_squares.BLOCK * sum_of_squares.ROUNDS),
    shift=st.integers(0, 3),
    poison=POISON,
    scale=st.sampled_from([1.0, 1e-3, 1e4]),
)
def sum_of_squares_of_lists(
    device: str, data: st.DataObject, seed: int, sizes: list[int], shift: int, poison: Any, scale: float
) -> None:
    torch.manual_seed(seed)
    tensors = [tensor(n, data.draw(DTYPES), device, shift, scale) for n in sizes]
    poisoned(tensors, poison)
    found = sum_of_squares.sum_of_squares(tensors)
    same(found, sum_of_squares.sum_of_squares(tensors))
    torch.testing.assert_close(found, reference_sum(tensors), rtol=1e-12, atol=0, equal_nan=True)


def squares_do_not_overflow(device: str) -> None:
    found = sum_of_squares.sum_of_squares([torch.full((100,), 1e30, device=device)])
    assert float(found) == 100 * float(torch.tensor(1e30, dtype=WIDE)) ** 2


@_settings
@given(
    data=st.data(),
    seed=SEEDS,
    sizes=lists(messages.BLOCK),
    rows=st.integers(1, 3),
    shift=st.sampled_from([0, 0, 1]),
    align=st.sampled_from([1, 16]),
    dtype=DTYPES,
    poison=POISON,
)
def messages_of_lists(
    device: str,
    data: st.DataObject,
    seed: int,
    sizes: list[int],
    rows: int,
    shift: int,
    align: int,
    dtype: torch.dtype,
    poison: Any,
) -> None:
    torch.manual_seed(seed)
    tensors = [tensor(n, data.draw(DTYPES), device, shift) for n in sizes]
    poisoned(tensors, poison)
    # As rows are split: all ranks have as many, but for the last ones.
    lengths = [-(-n // rows // align) * align + data.draw(st.sampled_from([0, align])) for n in sizes]
    offsets, width = [], 0
    for length in lengths:
        offsets.append(width)
        width += -(-length // align) * align + data.draw(st.sampled_from([0, align]))
    message = torch.full((rows, width), 7.0, dtype=dtype, device=device)
    again, wanted = message.clone(), message.clone()
    messages.pack(tensors, lengths, offsets, message)
    messages.pack(tensors, lengths, offsets, again)
    reference_pack(tensors, lengths, offsets, wanted)
    same(message, again)
    same(message, wanted)


@_settings
@given(
    data=st.data(),
    seed=SEEDS,
    sizes=lists(messages.BLOCK),
    number=st.sampled_from([1, 2, 3, 7, 48, 257]),
    shift=st.sampled_from([0, 0, 1]),
    scale=st.sampled_from([1.0, 1e4, 1e-6, 1e-37, 1e-44]),
    poison=POISON,
)
def means_of_lists(
    device: str, data: st.DataObject, seed: int, sizes: list[int], number: int, shift: int, scale: float, poison: Any
) -> None:
    """To the bits of torch's two operators: a division in the dtype of the sums, and a cast."""
    torch.manual_seed(seed)
    sums = [tensor(n, data.draw(DTYPES), device, shift, scale) for n in sizes]
    poisoned(sums, poison)
    outs = [torch.full_like(total, 7.0, dtype=data.draw(DTYPES)) for total in sums]
    again = [out.clone() for out in outs]
    messages.divide(sums, number, outs)
    messages.divide(sums, number, again)
    for total, out, other in zip(sums, outs, again, strict=True):
        same(out, other)
        same(bits_of(out), bits_of((total.cpu() / number).to(out.dtype)))


WIRES = st.sampled_from(["fp8", "int8", "int4", "sign"])
TILE = wires.BLOCKS * WIRE_BLOCK
ELEMENTS = st.sampled_from([0, 1, 7, 33, WIRE_BLOCK, WIRE_BLOCK + 1, TILE - 1, TILE, TILE + 3, 2 * TILE + 5])


def rows_of(rows: int, width: int, dtype: torch.dtype, shift: int) -> Tensor:
    """``[rows, width]``, of which rows lie ``shift`` elements apart, and begin as many behind an aligned address."""
    room = torch.full((rows * (width + shift) + shift,), 7, dtype=dtype)
    return room[shift:].view(rows, width + shift)[:, :width]


def bits_of(values: Tensor) -> Tensor:
    """Their bits, all NaN being one: GPUs and CPUs make different ones."""
    return values.cpu().nan_to_num(3.0, math.inf, -math.inf).view(torch.uint8)


def room_of(rows: Tensor) -> Tensor:
    """All memory that ``rows`` lie in, also what lies between them."""
    return rows.as_strided((rows.untyped_storage().nbytes() // rows.itemsize,), (1,), 0)


def to_device(rows: Tensor, device: str) -> Tensor:
    """A copy of ``rows`` on ``device``, as far apart as they are."""
    return room_of(rows).clone().to(device).as_strided(rows.shape, rows.stride(), rows.storage_offset())


@_settings
@given(
    seed=SEEDS,
    wire=WIRES,
    dtype=DTYPES,
    rows=st.integers(1, 3),
    elements=ELEMENTS,
    shift=st.sampled_from([0, 0, 1, 3]),
    power=st.sampled_from([0, 0, -10, 10, 100, -100, -126, -130, -140]),
    poison=POISON,
)
def wires_of_rows(
    device: str,
    seed: int,
    wire: str,
    dtype: torch.dtype,
    rows: int,
    elements: int,
    shift: int,
    power: int,
    poison: float | None,
) -> None:
    """Messages and what comes of them are the native kernels', and near the values."""
    torch.manual_seed(seed)
    values = rows_of(rows, elements, dtype, shift)
    values.copy_(torch.randn(rows, elements).double() * 2.0 ** (power if dtype != HALF else power / 10))
    values[:, WIRE_BLOCK : 2 * WIRE_BLOCK] = 0
    if poison is not None and elements:
        values[rows // 2, elements // 2] = poison
    wanted = rows_of(rows, wire_bytes(wire, elements), torch.uint8, 4 * shift)
    sent = to_device(wanted, device)
    encode_natively(wire, values, wanted)
    wires.encode(wire, to_device(values, device), sent)
    same(room_of(sent).cpu(), room_of(wanted))
    right = rows_of(rows, elements, dtype, shift)
    out = to_device(right, device)
    decode_natively(wire, wanted, right)
    wires.decode(wire, sent, out)
    same(bits_of(room_of(out)), bits_of(room_of(right)))
    if elements:
        near_values(wire, values, out.cpu())


def near_values(wire: str, values: Tensor, out: Tensor) -> None:
    """Whether no element is off by more than half a step of its block, or signs have the mean magnitude of it."""
    for own, came in zip(values.double().split(WIRE_BLOCK, 1), out.double().split(WIRE_BLOCK, 1), strict=True):
        good = own.isfinite().all(1)
        assert not came[~good].isfinite().any()
        own, came = own[good], came[good]
        limits = torch.finfo(values.dtype)
        rounding = own.abs().amax(1, keepdim=True) * EPSILON[values.dtype] + limits.tiny * limits.eps
        if wire == "sign":
            off, bound = came - torch.where(own >= 0, 1.0, -1.0) * own.abs().mean(1, keepdim=True), rounding
        else:
            scale = (own.abs().amax(1, keepdim=True) / WIRE_MOST[wire]).clamp(min=torch.finfo(WIDE).tiny)
            # fp8 has three bits behind the first one: half of the last, or half a step of its smallest numbers.
            half = torch.maximum(own.abs() / 16, scale / 2**10) if wire == "fp8" else scale / 2
            off, bound = came - own, half + rounding
        assert (off.abs() <= bound).all()


@_settings
@given(seed=SEEDS, wire=WIRES, dtype=DTYPES, rows=st.integers(1, 2), elements=ELEMENTS, scale=st.floats(0, width=32))
def wires_of_any_bytes(
    device: str, seed: int, wire: str, dtype: torch.dtype, rows: int, elements: int, scale: float
) -> None:
    """What no encoding gives is decoded as the native kernels do it, too."""
    torch.manual_seed(seed)
    sent = torch.randint(0, 256, (rows, wire_bytes(wire, elements)), dtype=torch.uint8)
    scales = sent[:, sent.shape[1] - 4 * -(-elements // WIRE_BLOCK) :]
    scales.copy_(torch.tensor([scale]).view(torch.uint8).repeat(rows, scales.shape[1] // 4))
    right, out = torch.empty(rows, elements, dtype=dtype), torch.empty(rows, elements, dtype=dtype, device=device)
    decode_natively(wire, sent, right)
    wires.decode(wire, sent.to(device), out)
    same(bits_of(out), bits_of(right))


@_settings
@given(
    seed=SEEDS,
    wire=st.sampled_from(["bf16", "fp8", "int8", "int4", "sign"]),
    dtype=DTYPES,
    senders=st.integers(1, 4),
    elements=ELEMENTS,
    fewer=st.sampled_from([0, 0, 1, WIRE_BLOCK]),
    shift=st.sampled_from([0, 0, 1, 4]),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    poison=POISON,
)
def sums_of_wires(
    device: str,
    seed: int,
    wire: str,
    dtype: torch.dtype,
    senders: int,
    elements: int,
    fewer: int,
    shift: int,
    scale: float,
    poison: float | None,
) -> None:
    """To the bits of messages that native kernels decode one by one, and torch adds up and casts."""
    torch.manual_seed(seed)
    values = torch.randn(senders, elements) * torch.logspace(-2, 2, senders).unsqueeze(1)
    values[:, WIRE_BLOCK : 2 * WIRE_BLOCK] = -0.0
    if poison is not None and elements:
        values[senders // 2, elements // 2] = poison
    sent = rows_of(senders, wire_bytes(wire, elements), torch.uint8, 4 * shift)
    if elements:
        encode_natively(wire, values, sent)
        decode_natively(wire, sent, values)
    total = values[0].clone()
    for term in values[1:]:
        total.add_(term)
    right = torch.full((elements + 8,), 7.0, dtype=dtype)
    out, count = right.to(device), max(0, elements - fewer)
    right[:count] = total.mul_(scale)[:count]
    wires.add_up(wire, to_device(sent, device), elements, out[:count], scale)
    same(bits_of(out), bits_of(right))


def wires_round_to_even(device: str) -> None:
    """Numbers in the middle of two of the format, and the next ones beside these, in blocks whose scale is one."""
    fp8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    formats = {"fp8": fp8, "int8": torch.arange(128.0), "int4": torch.arange(8.0)}
    for wire, numbers in formats.items():
        middles = (numbers[1:] + numbers[:-1]) / 2
        beside = [torch.nextafter(middles, torch.tensor(end)) for end in (0.0, math.inf)]
        tried = torch.cat([numbers, middles, *beside])
        tried = torch.cat([tried, -tried])
        blocks = pad(tried, (0, -len(tried) % (WIRE_BLOCK - 1))).view(-1, WIRE_BLOCK - 1)
        values = pad(blocks, (1, 0), value=WIRE_MOST[wire]).view(1, -1)
        message = torch.empty(1, wire_bytes(wire, values.numel()), dtype=torch.uint8, device=device)
        out = torch.empty_like(values, device=device)
        wires.encode(wire, values.to(device), message)
        wires.decode(wire, message, out)
        rounded = values.to(torch.float8_e4m3fn).float() if wire == "fp8" else values.round()
        assert torch.equal(out.cpu(), rounded), wire


CASES = {name: globals()[name] for name in NAMES}


def reference_update(
    tensors: adamw.Tensors,
    rule: adamw.Rule,
    factor: float | Tensor = 1.0,
    nonfinite: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """What :func:`adamw.update` does, in plain torch and in arithmetic of ``dtype``."""
    if nonfinite is not None and float(nonfinite) != 0.0:
        return
    lr, sign = float(rule.lr), -1.0 if rule.maximize else 1.0
    for i, param in enumerate(tensors.params):
        tensors.steps[i].add_(1.0)
        step = float(tensors.steps[i])
        average, square = tensors.averages[i].to(dtype), tensors.squares[i].to(dtype)
        grad = tensors.grads[i].to(dtype) * (sign * float(factor))
        value = param.to(dtype) * (1.0 - lr * rule.weight_decay if rule.decoupled else 1.0)
        if not rule.decoupled:
            grad = grad + rule.weight_decay * value
        average = torch.lerp(average, grad, 1.0 - rule.beta1)
        square = square * rule.beta2 + (1.0 - rule.beta2) * grad * grad
        tensors.averages[i].copy_(average)
        tensors.squares[i].copy_(square)
        if tensors.largest:
            square = torch.maximum(square, tensors.largest[i].to(dtype))
            tensors.largest[i].copy_(square)
        rate, root = lr / (1.0 - rule.beta1**step), math.sqrt(1.0 - rule.beta2**step)
        value = value - rate * average / (square.sqrt() / root + rule.eps)
        param.copy_(value)
        if tensors.copies:
            tensors.copies[i].copy_(value)


def reference_sum(tensors: Sequence[Tensor]) -> Tensor:
    """What :func:`sum_of_squares.sum_of_squares` does, in plain torch."""
    return torch.stack([t.double().square().sum() for t in tensors]).sum()


def reference_pack(tensors: Sequence[Tensor], lengths: Sequence[int], offsets: Sequence[int], message: Tensor) -> None:
    """What :func:`messages.pack` does, in plain torch."""
    for tensor, length, offset in zip(tensors, lengths, offsets, strict=True):
        for row in range(len(message)):
            piece = tensor.reshape(-1)[row * length : (row + 1) * length]
            message[row, offset : offset + length] = 0
            message[row, offset : offset + piece.numel()] = piece
