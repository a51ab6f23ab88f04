"""Adam and AdamW over a list of tensors in two launches, of which the first has one number for each tensor.

Arithmetic is that of the native kernels on the host (csrc/update.h): float32, scalars computed in float64 and rounded
once. Moments and parameters of low precision are widened as they are read and rounded as they are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerograph.runtime.kernels.tables import TRITON_DTYPES, NumberTable, block_of, blocks, on, pointer, table

BLOCK = 1024
"""Elements of a program."""

WARPS = 8
"""Warps of a program: a thread has four elements, one vector of each float32 tensor, and 64 registers do."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors updated together: on one device, each list of one dtype. All tensors of a parameter lie in memory alike.

    Attributes:
        params: what is updated: parameters, or their masters.
        grads: gradients.
        averages, squares: first and second moments.
        steps: how many updates each has had; float32, one element each.
        largest: the largest second moments, with amsgrad; else empty.
        copies: where updated parameters are written once more, in another precision; empty if nowhere.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    averages: Sequence[Tensor]
    squares: Sequence[Tensor]
    steps: Sequence[Tensor]
    largest: Sequence[Tensor] = ()
    copies: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of torch.optim.Adam and AdamW; ``decoupled`` tells which of the two decays weights.

    Attributes:
        lr: a tensor of one element is read on the device.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False


def update(tensors: Tensors, rule: Rule, factor: float | Tensor = 1.0, nonfinite: Tensor | None = None) -> None:
    """Take one step. Nothing waits for the device.

    Args:
        tensors: what is updated.
        rule: by which.
        factor: what gradients are multiplied by: unscaling and clipping. A tensor of one element is read on the device.
        nonfinite: one element; where it is not 0, nothing changes, the numbers of steps neither.
    """
    if not tensors.params:
        return
    device, sizes = tensors.params[0].device, tuple(map(Tensor.numel, tensors.params))
    lists = (tensors.params, tensors.grads, tensors.averages, tensors.squares, tensors.largest, tensors.copies)
    none = [0] * len(sizes)
    addresses = [[t.data_ptr() for t in each] or none for each in lists]
    # Counters are single numbers, wherever they lie: their addresses say nothing about vectors.
    shared = [_number(rule.lr), _log2(rule.beta1), _log2(rule.beta2), rule.weight_decay if rule.decoupled else 0.0]
    packed = table(addresses, [[t.data_ptr() for t in tensors.steps], sizes], [*shared, _number(factor), 0.0], device)
    for place, value in ((0, rule.lr), (4, factor), (5, nonfinite)):
        if isinstance(value, Tensor):
            packed.shared[place].copy_(value.reshape(()))
    with on(device):
        _launch(tensors, rule, packed, sizes)


def _launch(tensors: Tensors, rule: Rule, packed: NumberTable, sizes: tuple[int, ...]) -> None:
    device = packed.columns.device
    scalars = torch.empty(4, len(sizes), device=device)
    counted = (triton.cdiv(len(sizes), 128),)
    _count[counted](packed.columns, packed.shared, scalars, len(sizes), rule.maximize, 128, enable_fp_fusion=False)
    programs = blocks(sizes, BLOCK, device)
    if not len(programs):
        return
    rest = 1.0 - rule.beta1
    near = rest < 0.5
    _update[(len(programs),)](
        packed.columns,
        packed.shared,
        scalars,
        programs,
        len(sizes),
        rest if near else rest - 1.0,
        rule.beta2,
        1.0 - rule.beta2,
        rule.eps,
        0.0 if rule.decoupled else rule.weight_decay,
        *(TRITON_DTYPES[each[0].dtype] for each in (tensors.params, tensors.grads, tensors.averages)),
        TRITON_DTYPES[tensors.copies[0].dtype] if tensors.copies else None,
        bool(tensors.largest),
        not rule.decoupled and rule.weight_decay != 0.0,
        near,
        packed.aligned,
        BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,  # or products would be rounded in other places than on the host
    )


def _number(value: float | Tensor) -> float:
    """For the table; what is a tensor is copied there on the device."""
    return 0.0 if isinstance(value, Tensor) else float(value)


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0.0 else -math.inf


@triton.jit(do_not_specialize=["count"])
def _count(
    columns: tl.tensor,
    shared: tl.tensor,
    scalars: tl.tensor,
    count: tl.tensor,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Count a step of each tensor, and write its scalars: step size, 1 / sqrt(1 - beta2^step), decay and factor."""
    if tl.load(shared + 5) == 0.0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        steps = tl.load(columns + 6 * count + at, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(steps, mask=mask, other=0.0) + 1.0
        tl.store(steps, step, mask=mask)
        step = step.to(tl.float64)
        lr = tl.load(shared)
        rate = -lr / (1.0 - tl.exp2(step * tl.load(shared + 1)))
        root = 1.0 / tl.sqrt(1.0 - tl.exp2(step * tl.load(shared + 2)))
        decay = 1.0 - lr * tl.load(shared + 3)
        factor = tl.load(shared + 4)
        if MAXIMIZE:
            factor = -factor
        tl.store(scalars + at, rate.to(tl.float32), mask=mask)
        tl.store(scalars + count + at, root.to(tl.float32), mask=mask)
        tl.store(scalars + 2 * count + at, decay.to(tl.float32), mask=mask)
        tl.store(scalars + 3 * count + at, factor.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _update(
    columns: tl.tensor,
    shared: tl.tensor,
    scalars: tl.tensor,
    programs: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    COPY: tl.constexpr,
    AMSGRAD: tl.constexpr,
    COUPLED: tl.constexpr,
    NEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(shared + 5) == 0.0:
        owner, first = block_of(programs, BLOCK)
        size = tl.load(columns + 7 * count + owner)
        # Full blocks need no mask, and only without one do threads load vectors.
        if first + BLOCK <= size:
            _update_block(
                columns, scalars, count, owner, first, size, weight, beta2, rest2, eps, weight_decay,
                PARAM, GRAD, STATE, COPY, AMSGRAD, COUPLED, NEAR, ALIGNED, False, BLOCK,
            )  # fmt: skip
        else:
            _update_block(
                columns, scalars, count, owner, first, size, weight, beta2, rest2, eps, weight_decay,
                PARAM, GRAD, STATE, COPY, AMSGRAD, COUPLED, NEAR, ALIGNED, True, BLOCK,
            )  # fmt: skip


@triton.jit
def _update_block(
    columns: tl.tensor, scalars: tl.tensor, count: tl.tensor, owner: tl.tensor, first: tl.tensor, size: tl.tensor,
    weight: tl.tensor, beta2: tl.tensor, rest2: tl.tensor, eps: tl.tensor, weight_decay: tl.tensor,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COPY: tl.constexpr, AMSGRAD: tl.constexpr,
    COUPLED: tl.constexpr, NEAR: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = first + tl.arange(0, BLOCK)
    if MASKED:
        mask = at < size
    else:
        mask = None
    rate, root = tl.load(scalars + owner), tl.load(scalars + count + owner)
    decay, factor = tl.load(scalars + 2 * count + owner), tl.load(scalars + 3 * count + owner)
    params = pointer(columns, owner, PARAM, ALIGNED) + at
    averages = pointer(columns, 2 * count + owner, STATE, ALIGNED) + at
    squares = pointer(columns, 3 * count + owner, STATE, ALIGNED) + at
    grad = tl.load(pointer(columns, count + owner, GRAD, ALIGNED) + at, mask=mask).to(tl.float32) * factor
    value = tl.load(params, mask=mask).to(tl.float32) * decay
    average = tl.load(averages, mask=mask).to(tl.float32)
    square = tl.load(squares, mask=mask).to(tl.float32)
    if COUPLED:
        grad = grad + weight_decay * value
    if NEAR:  # torch.lerp counts from the nearer end
        average = average + weight * (grad - average)
    else:
        average = grad + weight * (grad - average)
    square = square * beta2 + rest2 * grad * grad
    tl.store(averages, average.to(STATE), mask=mask)
    tl.store(squares, square.to(STATE), mask=mask)
    if AMSGRAD:
        tops = pointer(columns, 4 * count + owner, STATE, ALIGNED) + at
        before = tl.load(tops, mask=mask).to(tl.float32)
        square = tl.where((square > before) | (square != square), square, before)  # NaN stays, as in torch.maximum
        tl.store(tops, square.to(STATE), mask=mask)
    value = value + tl.div_rn(rate * average, tl.sqrt_rn(square) * root + eps)
    tl.store(params, value.to(PARAM), mask=mask)
    if COPY is not None:
        tl.store(pointer(columns, 5 * count + owner, COPY, ALIGNED) + at, value.to(COPY), mask=mask)
