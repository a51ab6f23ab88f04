"""Cross-entropy of a tile of tokens, whose logits a product has made, and in their place their gradient.

A linear head and its loss go tile by tile over tokens, so that logits never exist whole. Torch multiplies (cuBLAS); the
kernels do what stands between the product of the forward and those of the backward. A program has one token, and goes
through its words in blocks with an online softmax (Milakov and Gimelshein, 2018). A tile is read once for its losses,
and read and written once for its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zerograph.runtime.kernels.tables import on

BLOCK = 4096
"""Words at a time."""

WARPS = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """What ``torch.nn.functional.cross_entropy`` takes, and what models add to it.

    Attributes:
        weight: of each word, float32; None if all count alike.
        ignore_index: the target of tokens that do not count.
        label_smoothing: the share of the target's probability that goes to all words.
        z_loss: times the square of ``logsumexp``, added to each token's loss.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them.
    """

    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


def losses(logits: Tensor, targets: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """The loss of each token.

    Args:
        logits: ``[tokens, words]``; a row's words lie side by side.
        targets: int64 ``[tokens]``. One that is neither a word nor ``ignore_index`` gets a loss of NaN.
        loss: which.

    Returns:
        The losses, 0 of tokens that do not count, and each token's logsumexp, which :func:`gradients_` takes; both
        float32 ``[tokens]``.
    """
    out, logsumexp = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    if len(logits):
        with on(logits.device):
            _losses[(len(logits),)](logits, targets, out, logsumexp, *_common(logits, loss), num_warps=WARPS)
    return out, logsumexp


def gradients_(logits: Tensor, targets: Tensor, logsumexp: Tensor, scale: Tensor, loss: Loss) -> None:
    """Write into ``logits`` the gradient of the losses that :func:`losses` gave, each times its ``scale``.

    Args:
        logits, targets, loss: as given there.
        logsumexp: from there.
        scale: float32 ``[tokens]``, the gradient of each token's loss; :func:`scales` has those of reductions.
    """
    if len(logits):
        with on(logits.device):
            _gradients[(len(logits),)](logits, targets, logsumexp, scale, *_common(logits, loss), num_warps=WARPS)


def scales(targets: Tensor, loss: Loss, reduction: str) -> Tensor:
    """What a reduction multiplies the loss of each token by, float32 ``[tokens]``.

    Args:
        targets: of all tokens, not of a tile: a mean divides by the weights of all that count.
        loss: which.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: another reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction={reduction!r} is none of "mean", "sum" and "none"')
    one = torch.ones(len(targets), device=targets.device)
    if reduction != "mean":
        return one
    counts = targets != loss.ignore_index
    weights = one if loss.weight is None else loss.weight.float()[targets.where(counts, 0)]
    return one / weights.where(counts, 0.0).sum()


def _common(logits: Tensor, loss: Loss) -> tuple[object, ...]:
    assert logits.stride(1) == 1
    words, weight = logits.shape[1], loss.weight
    return (
        weight,
        None if weight is None else weight.sum(),
        logits.stride(0),
        words,
        loss.ignore_index,
        float(loss.label_smoothing),
        float(loss.z_loss),
        float(loss.softcap or 0.0),
        weight is not None,
        loss.label_smoothing > 0.0,
        loss.softcap is not None,
        min(BLOCK, triton.next_power_of_2(words)),
    )


@triton.jit
def _capped(logit: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(logit / softcap), right within 2^-23 of softcap."""
    small = tl.exp(-2.0 * tl.abs(logit) / softcap)
    size = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(logit < 0.0, -size, size)


@triton.jit
def _hot(
    targets: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    words: tl.tensor,
    label_smoothing: tl.tensor,
    WEIGHTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The target of a token, and what its loss puts on it: NaN where there is no such word."""
    target = tl.load(targets + row)
    there = (target >= 0) & (target < words)
    share = tl.where(there, 1.0 - label_smoothing, float("nan"))
    if WEIGHTED:
        share *= tl.load(weight + target, mask=there, other=0.0).to(tl.float32)
    return target, there, share


@triton.jit(do_not_specialize=["ignore_index"])
def _losses(
    logits: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    logsumexp: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    spread = tl.full([], 0.0, tl.float32)
    for first in range(0, words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(begin + at, mask=at < words, other=float("-inf")).to(tl.float32)
        if CAPPED:
            logit = tl.where(at < words, _capped(logit, softcap), float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(logit))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # of words that are all ruled out
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(logit - shift))
        if SMOOTHED:
            part = tl.where(at < words, logit, 0.0)
            if WEIGHTED:
                part *= tl.load(weight + at, mask=at < words, other=0.0).to(tl.float32)
            spread += tl.sum(part)
    whole = largest + tl.log(total)
    target, there, share = _hot(targets, weight, row, words, label_smoothing, WEIGHTED)
    logit = tl.load(begin + target, mask=there, other=0.0).to(tl.float32)
    if CAPPED:
        logit = _capped(logit, softcap)
    value = share * (whole - logit) + z_loss * whole * whole
    if SMOOTHED:
        if WEIGHTED:
            value += label_smoothing / words * (tl.load(weight_sum).to(tl.float32) * whole - spread)
        else:
            value += label_smoothing * (whole - spread / words)
    tl.store(out + row, tl.where(target == ignore_index, 0.0, value))
    tl.store(logsumexp + row, whole)


@triton.jit(do_not_specialize=["ignore_index"])
def _gradients(
    logits: tl.tensor,
    targets: tl.tensor,
    logsumexp: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.tensor,
    z_loss: tl.tensor,
    softcap: tl.tensor,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    whole = tl.load(logsumexp + row)
    target, _, share = _hot(targets, weight, row, words, label_smoothing, WEIGHTED)
    times = tl.load(scale + row)
    # Of each word's probability: what its shares of the loss add up to.
    rest = share + 2.0 * z_loss * whole
    each = label_smoothing / words
    if SMOOTHED:
        if WEIGHTED:
            rest += each * tl.load(weight_sum).to(tl.float32)
        else:
            rest += label_smoothing
    for first in range(0, words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(begin + at, mask=at < words, other=0.0).to(tl.float32)
        if CAPPED:
            logit = _capped(logit, softcap)
        grad = tl.exp(logit - whole) * rest
        if SMOOTHED:
            if WEIGHTED:
                grad -= each * tl.load(weight + at, mask=at < words, other=0.0).to(tl.float32)
            else:
                grad -= each
        grad = tl.where(at == target, grad - share, grad)
        if CAPPED:
            slope = logit / softcap
            grad *= 1.0 - slope * slope
        grad = tl.where(target == ignore_index, 0.0, grad * times)
        tl.store(begin + at, grad.to(logits.dtype.element_ty), mask=at < words)


def reference(logits: Tensor, targets: Tensor, loss: Loss, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """What :func:`losses` does, in plain torch and in arithmetic of ``dtype``; autograd has the gradient."""
    logits = logits.to(dtype)
    if loss.softcap is not None:
        logits = loss.softcap * torch.tanh(logits / loss.softcap)
    weight = None if loss.weight is None else loss.weight.to(dtype)
    logsumexp = logits.logsumexp(1)
    out = F.cross_entropy(
        logits,
        targets,
        weight,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        reduction="none",
    )
    counts = targets != loss.ignore_index
    return torch.where(counts, out + loss.z_loss * logsumexp.square(), 0.0), logsumexp
