"""The largest batch, sequence or model that fits, over all rows of an estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from zerograph.planner.estimate.estimate import Question, Row
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.search.furthest import furthest

What = Literal["batch", "seq", "params"]
WHATS: tuple[What, ...] = ("batch", "seq", "params")
_MOST = 2**40


@dataclass(frozen=True, slots=True)
class LargestEstimate:
    """The answer: the value, the question with it put in, and the next one, which does not fit.

    ``question`` is None where not even the smallest fits; ``beyond`` is then that smallest one.
    """

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
    if what != "params":
        return _bisect(lambda n: replace(question, training=replace(question.training, **{what: n})))  # type: ignore[arg-type]
    vocab = question.size.vocab

    def sized(size: ModelSize) -> Question:
        return replace(question, size=size)

    if layers is not None:
        # In steps of 128: widths that kernels like, and that heads divide.
        wide = _bisect(lambda n: sized(ModelSize.of(layers=layers, hidden=128 * n, vocab=vocab)))
        return _in_parameters(wide)
    if hidden is None:
        rung = _bisect(lambda n: sized(ModelSize.balanced(n, vocab)))
        if rung.question is None:
            return _in_parameters(rung)
        hidden = rung.question.size.hidden
    start = ModelSize.of(layers=1, hidden=hidden, vocab=vocab)
    return _in_parameters(_bisect(lambda n: sized(start.with_layers(n))))


def _in_parameters(found: LargestEstimate) -> LargestEstimate:
    return replace(found, value=found.question.size.parameters if found.question else 0)


def _bisect(at: Callable[[int], Question]) -> LargestEstimate:
    """The largest n with a row that fits: of each strategy, those that leave the least on the device first, whether one
    more than the best so far does; then how far it does."""
    best = 0
    for group in reversed(tuple(at(1).groups())):
        for strategy in reversed(group):
            while best < _MOST and (row := Row(at(best + 1), strategy).tiled()).fits:
                best = furthest(partial(_over, row, at), 2 * (best + 1), _MOST, best + 1)
            if row.need["device"] > row.have["device"]:
                break  # what is left keeps more on the device
    return LargestEstimate(best, at(best) if best else None, at(best + 1))


def _over(row: Row, at: Callable[[int], Question], n: int) -> float:
    """By how much ``row`` is over at ``n``; of what is held between steps, where that is too much already."""
    row = replace(row, question=at(n))
    return row.held_over if row.held_over > 0 else row.over
