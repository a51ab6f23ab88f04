"""The largest batch or sequence of a traced step that a plan exists for within a budget.

Needs only grow with either, nearly in proportion: sizes are doubled until one is too large, and what lies between is
narrowed by a straight line through what its two ends overrun the budget by: of the fullest tier, under the plan that
fits best. Where a line does not halve it, it is halved.

A size may have no step, and its neighbours may: a model that folds a sequence into windows of 8 has those of multiples
of 8. So where there is none, the sizes beside it are tried, and only where none of them has one the model ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerograph.core.errors import SizeError
from zerograph.core.machine import TIERS, Tier
from zerograph.planner.candidates import Candidate
from zerograph.planner.search import Search, limits

MOST = 2**30
"""Sizes beyond are not tried."""

BESIDE = 64
"""Sizes without a step, next to each other, at which a model is taken to end."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The answer.

    Attributes:
        value: the largest size at which the step fits; 0 where none does.
        search: of the step at that size, or at the smallest there is.
        need: bytes of ``tier`` that the step needs at least at ``next``; None where no larger one is known.
        limit: why there is none; empty where there is.
        next: the next size that has a step: ``value + 1``, but for models that have gaps.
        tier: the one that is too small for ``next``; the device where none is known.
        held: bytes of it that the step needs at least at ``value``.
    """

    value: int
    search: Search
    need: int | None
    limit: str = ""
    next: int = 0
    tier: Tier = "device"
    held: int = 0


@dataclass(frozen=True, slots=True)
class _Tried:
    """One size: by what share of its budget the fullest tier is overrun; or why there is no step of that size."""

    over: float = 0.0
    search: Search | None = None
    limit: str = ""

    @property
    def fits(self) -> bool:
        return self.search is not None and self.over <= 0


Budget = int | Mapping[Tier, int]
"""Bytes per tier, none where one is missing; a number is the device's, and leaves the others unlimited."""


def fill(search_at: Callable[[int], Search], budget: Budget, start: int) -> Filled:
    """The largest size within ``budget``.

    Args:
        search_at: the candidates for the step of some size; a ``SizeError`` says that there is no such step.
        start: the size to try first.
    """
    tried: dict[int, _Tried] = {0: _Tried()}

    def at(size: int) -> _Tried:
        if size not in tried:
            tried[size] = _try(search_at, size, budget)
        return tried[size]

    first = _near(at, start, 1, start + BESIDE)
    if first == 0:
        raise SizeError(at(start).limit)
    low, high = _around(at, first)
    while True:
        low = _narrow(at, low, high) if low else 0
        beyond = next((n for n in range(low + 1, low + BESIDE + 1) if at(n).search), 0) if low else high
        if low >= MOST or not at(beyond).fits:
            break
        low, high = beyond, 2 * beyond  # across a gap
    found = at(low or beyond).search
    assert found is not None
    if low >= MOST or not beyond:
        limit = f"sizes above {MOST} were not tried" if low >= MOST else at(low + 1).limit
        return Filled(low, found, None, limit, held=_least(found, budget, "device"))
    too_large = at(beyond).search
    assert too_large is not None
    _, need, tier = fullest(too_large, budget)
    return Filled(low, found, need, "", beyond, tier, _least(found, budget, tier))


def _least(search: Search, budget: Budget, tier: Tier) -> int:
    """The fewest bytes of ``tier`` that any plan within ``budget`` holds; of any plan, where none is."""
    most, place = limits(budget), TIERS.index(tier)
    fitting = [candidate for candidate in search.best if candidate.fits(most)] or search.best
    return min(candidate.peaks[place] for candidate in fitting)


def fullest(search: Search, budget: Budget) -> tuple[float, int, Tier]:
    """Of the plan that fits ``budget`` best, the tier that it fills most: by what share it is overrun (below 0 where it
    is not), the bytes that it holds, and which one it is. A tier that is not there and holds nothing is not asked."""
    most = limits(budget)

    def of(candidate: Candidate) -> tuple[float, int, Tier]:
        shares = [((p - m) / max(1, m), p, t) for p, m, t in zip(candidate.peaks, most, TIERS, strict=True) if p or m]
        return max(shares, key=lambda share: share[0])

    return min((of(candidate) for candidate in search.best), key=lambda share: share[0])


def _around(at: Callable[[int], _Tried], first: int) -> tuple[int, int]:
    """A size that fits, 0 where none does, and a larger one that does not."""
    low = high = first
    while at(high).fits and low < MOST:
        low = high
        high = _near(at, 2 * low, low + 1, 2 * low + BESIDE) or 2 * low
    while low and not at(low).fits:
        low, high = _near(at, low // 2, 1, low - 1), low
    return low, high


def _near(at: Callable[[int], _Tried], size: int, least: int, most: int) -> int:
    """The size nearest to ``size`` that has a step, smaller ones first; 0 where there is none beside it."""
    for distance in range(BESIDE):
        for near in dict.fromkeys((size - distance, size + distance)):
            if least <= near <= most and at(near).search:
                return near
    return 0


def _narrow(at: Callable[[int], _Tried], low: int, high: int) -> int:
    """The largest size from ``low``, which fits, to ``high``, which does not; nothing is known of what lies between."""
    halve = False
    while high - low > 1 and not at(high).fits:
        width, middle = high - low, (low + high) // 2
        below, above = at(low).over, at(high).over
        if not halve and at(low).search and at(high).search and above > below:
            middle = min(max(low + int(-below * width / (above - below)), low + 1), high - 1)
        near = _near(at, middle, low + 1, high - 1)
        if near == 0:
            high = middle
        else:
            low, high = (near, high) if at(near).fits else (low, near)
        halve = not halve and high - low > width // 2
    return low


def _try(search_at: Callable[[int], Search], size: int, budget: Budget) -> _Tried:
    try:
        search = search_at(size)
    except SizeError as error:
        return _Tried(limit=str(error).partition("\n\n")[0])
    return _Tried(fullest(search, budget)[0], search)
