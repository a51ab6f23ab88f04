"""The largest batch or sequence of a step that a plan exists for within a budget.

Needs only grow with either, nearly in proportion: a straight line through what two sizes leave of the budget (of the
fullest tier, under the plan that fits best) says which one to try next. Where that does not halve what lies between the
largest size that fits and the smallest that does not, it is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerograph.core.errors import SizeError
from zerograph.core.machine import TIERS, Tier
from zerograph.planner.search import Search, limits
from zerograph.planner.space import Candidate

MOST = 2**30
"""Sizes beyond are not tried."""


@dataclass(frozen=True, slots=True)
class LargestSize:
    """The answer.

    Attributes:
        value: the largest size at which the step fits; 0 where none does.
        search: of the step at that size, or at the smallest there is.
        need: bytes of ``tier`` that the step needs at least at ``next``; None where no larger one is known.
        limit: why there is none; empty where there is.
        next: the next size: ``value + 1``, or the smallest that has a step where none fits.
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


def largest_size(search_at: Callable[[int], Search], budget: Budget, start: int) -> LargestSize:
    """The largest size within ``budget``.

    Args:
        search_at: the candidates for the step of some size; a ``SizeError`` says that there is no such step, nor one of
            any larger size.
        start: the size to try first.

    Raises:
        SizeError: there is no step at all.
    """
    tried: dict[int, _Tried] = {}
    low, high, size, halve = 0, MOST + 1, start, False
    while high - low > 1:
        width = high - low
        tried[size] = _try(search_at, size, budget)
        low, high = (size, high) if tried[size].fits else (low, size)
        halve = not halve and width // 2 < high - low < MOST - low
        size = (low + high) // 2 if halve else _crossing(tried, low, high)
    return _answer(tried, low, budget)


def _crossing(tried: Mapping[int, _Tried], low: int, high: int) -> int:
    """Where needs meet the budget on a line through two sizes: those next to it on either side, or on one."""
    below = [n for n in sorted(tried) if n <= low and tried[n].search]
    above = [n for n in sorted(tried) if n >= high and tried[n].search]
    ends = [*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]]
    if len(ends) == 2:
        (near, over), (far, other) = ((n, tried[n].over) for n in ends)
        if other > over:
            return min(max(near - int(over * (far - near) / (other - over)), low + 1), high - 1)
    # Nothing was too large yet: double.
    return min(2 * low, high - 1) if high > MOST else (low + high) // 2


def _answer(tried: Mapping[int, _Tried], low: int, budget: Budget) -> LargestSize:
    found = tried[low].search if low else None
    beyond = low + 1 if low else min((n for n in tried if tried[n].search), default=1)
    after = tried.get(beyond, _Tried(limit=f"sizes above {MOST} were not tried"))
    if after.search is None:
        if found is None:
            raise SizeError(after.limit)
        return LargestSize(low, found, None, after.limit, held=_least(found, budget, "device"))
    _, need, tier = fullest(after.search, budget)
    found = found or after.search
    return LargestSize(low, found, need, "", beyond, tier, _least(found, budget, tier))


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


def _try(search_at: Callable[[int], Search], size: int, budget: Budget) -> _Tried:
    try:
        search = search_at(size)
    except SizeError as error:
        return _Tried(limit=str(error).partition("\n\n")[0])
    return _Tried(fullest(search, budget)[0], search)
