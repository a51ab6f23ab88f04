"""The largest batch, sequence or model that fits, by bisection over its rows: needs grow with each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from zerograph.planner.estimate import Question, Row
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
    """The largest n with a row that fits: of each strategy, those that leave the least on the device first, whether one
    more than the best so far does; then doubled until it does not, and divided between."""
    best = 0
    for group in reversed(tuple(at(1).groups())):
        for strategy in reversed(group):
            while best < _MOST and (row := Row(at(best + 1), strategy).tiled()).fits:
                best = _furthest(best + 1, lambda n, row=row: _over(replace(row, question=at(n))))  # type: ignore[misc]
            if row.need["device"] > row.have["device"]:
                break  # what is left keeps more on the device
    return LargestEstimate(what, best, at(best) if best else None, at(best + 1))


def _over(row: Row) -> float:
    """By how much the row is over, above 0 where it does not fit."""
    return 1.0 if row.hopeless else row.over


def _furthest(low: int, over: Callable[[int], float]) -> int:
    """The largest n that is not over, where ``low`` is not. Needs are nearly straight in n: every other look is where
    the line between what fits and what does not says, the others halve what lies between."""
    below, high, line = over(low), 2 * low, True
    while (above := over(high)) <= 0 and high < _MOST:
        low, below, high = high, above, 2 * high
    while high - low > 1:
        share = -below / (above - below) if line else 0.5
        middle, line = min(max(low + int(share * (high - low)), low + 1), high - 1), not line
        now = over(middle)
        if now <= 0:
            low, below = middle, now
        else:
            high, above = middle, now
    return low
