"""The largest batch, sequence or model that fits, by bisection: needs only grow with each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from zerograph.planner.estimate import Question, any_fits
from zerograph.planner.sizes import ModelSize

What = Literal["batch", "seq", "params"]
WHATS: tuple[What, ...] = ("batch", "seq", "params")
_MOST = 2**40


@dataclass(frozen=True, slots=True)
class LargestEstimate:
    """The answer: ``value`` of ``what``, the question with it put in, and the next one, which does not fit.

    ``question`` is None where not even the smallest fits; ``beyond`` is then that smallest one.
    """

    what: What
    value: int
    question: Question | None
    beyond: Question


def largest_estimate(
    question: Question, what: What, *, layers: int | None = None, hidden: int | None = None
) -> LargestEstimate:
    """The largest ``what`` at which any row of ``question`` fits; everything else stays as asked.

    For "params" the model's shape is free unless ``layers`` or ``hidden`` fixes one of them: it grows in depth and
    width together (128 hidden per layer), and then by single layers at that width. Vocabulary stays.
    """
    if what == "batch":
        return _bisect(what, lambda n: replace(question, training=replace(question.training, batch=n)))
    if what == "seq":
        return _bisect(what, lambda n: replace(question, training=replace(question.training, seq=n)))
    vocab = question.size.vocab

    def sized(size: ModelSize) -> Question:
        return replace(question, size=size)

    if layers is not None:
        # In steps of 128: widths that kernels like, and that heads divide.
        wide = _bisect(what, lambda n: sized(ModelSize.of(layers=layers, hidden=128 * n, vocab=vocab)))
        return _in_parameters(wide)
    if hidden is None:
        rung = _bisect(what, lambda n: sized(ModelSize.balanced(n, vocab)))
        if rung.question is None:
            return _in_parameters(rung)
        hidden = rung.question.size.hidden
    start = ModelSize.of(layers=1, hidden=hidden, vocab=vocab)
    return _in_parameters(_bisect(what, lambda n: sized(start.with_layers(n))))


def _in_parameters(found: LargestEstimate) -> LargestEstimate:
    return replace(found, value=found.question.size.parameters if found.question else 0)


def _bisect(what: What, at: Callable[[int], Question]) -> LargestEstimate:
    """The largest n with a row that fits: doubled until none does, then halved between."""
    if not any_fits(at(1)):
        return LargestEstimate(what, 0, None, at(1))
    low, high = 1, 2
    while high < _MOST and any_fits(at(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if any_fits(at(middle)) else (low, middle)
    return LargestEstimate(what, low, at(low), at(high))
