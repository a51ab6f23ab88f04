"""Properties of the Triton kernels, on any device: interpreted on a CPU (tests/runtime/kernels), compiled on a GPU
(tests/gpu). Each runs a kernel twice, which must give the same bits, and compares it with a reference in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_names import NAMES
from torch import Tensor

from zerograph.runtime.kernels import adamw, linear_cross_entropy, messages, sum_of_squares

WIDE, NARROW, HALF = torch.float32, torch.bfloat16, torch.float16
DTYPES = st.sampled_from([WIDE, NARROW, HALF])
POISON = st.sampled_from([None, None, None, math.nan, math.inf, -math.inf])
SEEDS = st.integers(0, 2**32 - 1)
EPSILON = {WIDE: 1e-6, NARROW: 2.0**-7, HALF: 2.0**-10}
"""Relative: of low precision one digit, which two roundings of nearly the same number may differ by."""

_settings = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


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
    adamw.reference(wanted, rule, factor, nonfinite)
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
    torch.testing.assert_close(found, sum_of_squares.reference(tensors), rtol=1e-12, atol=0, equal_nan=True)


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
    messages.reference(tensors, lengths, offsets, wanted)
    same(message, again)
    same(message, wanted)


def _loss(data: st.DataObject, words: int, device: str) -> linear_cross_entropy.Loss:
    weight = torch.rand(words, device=device) if data.draw(st.booleans(), label="weight") else None
    return linear_cross_entropy.Loss(
        weight,
        ignore_index=data.draw(st.sampled_from([-100, 0])),
        label_smoothing=data.draw(st.sampled_from([0.0, 0.1])),
        z_loss=data.draw(st.sampled_from([0.0, 1e-2])),
        softcap=data.draw(st.sampled_from([None, 30.0])),
    )


@_settings
@given(
    data=st.data(),
    seed=SEEDS,
    tokens=st.integers(0, 5),
    words=st.sampled_from([1, 2, 31, 512, 4095, 4096, 4097, 9000]),
    padding=st.sampled_from([0, 0, 1, 16]),
    dtype=DTYPES,
    poison=POISON,
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def cross_entropy_of_tiles(
    device: str,
    data: st.DataObject,
    seed: int,
    tokens: int,
    words: int,
    padding: int,
    dtype: torch.dtype,
    poison: Any,
    reduction: str,
) -> None:
    torch.manual_seed(seed)
    spread = data.draw(st.sampled_from([1.0, 20.0]), label="spread")
    full = (torch.randn(tokens, words + padding) * spread).to(device, dtype)
    logits = full[:, :words]
    loss = _loss(data, words, device)
    targets = torch.randint(words, (tokens,), device=device)
    targets[torch.rand(tokens, device=device) < 0.3] = loss.ignore_index
    counts = targets != loss.ignore_index
    touched = torch.zeros(tokens, dtype=torch.bool, device=device)
    if poison is not None and words > 2 and bool(counts.any()):
        row = int(counts.nonzero()[0])
        logits[row, int(targets[row]) - 1], touched[row] = poison, True
        if loss.softcap is not None and not math.isnan(poison):
            touched[row] = False  # an infinity becomes the cap
    before = full.clone()
    leaf = before[:, :words].double().requires_grad_()
    wanted, logsumexp = linear_cross_entropy.reference(leaf, targets, loss)
    gradient = torch.randn(tokens, device=device) if reduction == "none" else torch.ones(tokens, device=device)
    scale = linear_cross_entropy.scales(targets, loss, reduction) * gradient

    out, found = linear_cross_entropy.losses(logits, targets, loss)
    for mine, again in zip((out, found), linear_cross_entropy.losses(logits, targets, loss), strict=True):
        same(mine, again)
    near(out, wanted.detach(), WIDE, scale=10 * spread * (1 + spread * loss.z_loss))
    near(found[~touched], logsumexp.detach()[~touched], WIDE, scale=10 * spread)  # of infinity torch's is infinite

    repeated = full.clone()
    linear_cross_entropy.gradients_(logits, targets, found, scale, loss)
    linear_cross_entropy.gradients_(repeated[:, :words], targets, found, scale, loss)
    same(full, repeated)
    same(full[:, words:], before[:, words:])
    assert not bool(logits[~counts].any()), "a token that does not count has a gradient"
    if bool(counts.any()):
        wanted[counts & ~touched].backward(scale[counts & ~touched].double())
        clean = counts & ~touched
        size = float(scale[clean].abs().max()) * 40 if bool(clean.any()) else 1.0
        near(logits[clean], leaf.grad[clean], dtype, scale=size)
    if poison == math.inf or (poison is not None and math.isnan(poison)):
        assert bool(logits[touched].isnan().all()), "a gradient hides what is not finite"


def cross_entropy_of_many_words(device: str) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 262_144) * 4).to(device)
    targets = torch.tensor([262_143, 0, 131_072], device=device)
    loss = linear_cross_entropy.Loss(label_smoothing=0.1, z_loss=1e-3)
    leaf = logits.double().requires_grad_()
    wanted, _ = linear_cross_entropy.reference(leaf, targets, loss)
    wanted.sum().backward()
    found, logsumexp = linear_cross_entropy.losses(logits, targets, loss)
    near(found, wanted.detach(), WIDE)
    linear_cross_entropy.gradients_(logits, targets, logsumexp, torch.ones(3, device=device), loss)
    near(logits, leaf.grad, WIDE)


def a_target_out_of_range_is_not_a_number(device: str) -> None:
    logits, targets = torch.zeros(3, 8, device=device), torch.tensor([8, 3, -1], device=device)
    found, logsumexp = linear_cross_entropy.losses(logits, targets, linear_cross_entropy.Loss())
    assert found.isnan().tolist() == [True, False, True]
    linear_cross_entropy.gradients_(
        logits, targets, logsumexp, torch.ones(3, device=device), linear_cross_entropy.Loss()
    )
    assert logits.isnan().any(dim=1).tolist() == [True, False, True]


def an_unknown_reduction_is_an_error(device: str) -> None:
    with pytest.raises(ValueError, match="average"):
        linear_cross_entropy.scales(
            torch.zeros(1, dtype=torch.int64, device=device), linear_cross_entropy.Loss(), "average"
        )


CASES = {name: globals()[name] for name in NAMES}
