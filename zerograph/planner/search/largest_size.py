"""The largest batch or sequence of a step that a plan exists for within a budget.

How much a size leaves of the budget is given by the fullest tier, under the plan that fits best
(:mod:`~zerograph.planner.search.furthest`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from zerograph.core.errors import SizeError
from zerograph.core.machine import TIERS, Tier
from zerograph.planner.search.furthest import furthest
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import limits, overrun

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
    tried: dict[int, Search | str] = {}  # or why there is no step of that size

    def over(size: int) -> float | None:
        try:
            search = tried[size] = search_at(size)
        except SizeError as error:
            tried[size] = str(error).partition("\n\n")[0]
            return None
        return fullest(search, budget)[0]

    return _answer(tried, furthest(over, start, MOST), budget)


def _answer(tried: Mapping[int, Search | str], low: int, budget: Budget) -> LargestSize:
    found = tried.get(low)
    beyond = low + 1 if low else min((n for n, search in tried.items() if isinstance(search, Search)), default=1)
    after = tried.get(beyond, f"sizes above {MOST} were not tried")
    if isinstance(after, str):
        if not isinstance(found, Search):
            raise SizeError(after)
        return LargestSize(low, found, None, after, held=_least(found, budget, "device"))
    _, need, tier = fullest(after, budget)
    found = found if isinstance(found, Search) else after
    return LargestSize(low, found, need, "", beyond, tier, _least(found, budget, tier))


def _least(search: Search, budget: Budget, tier: Tier) -> int:
    """The fewest bytes of ``tier`` that any plan within ``budget`` holds; of any plan, where none is."""
    most, place = limits(budget), TIERS.index(tier)
    fitting = [candidate for candidate in search.best if candidate.fits(most)] or search.best
    return min(candidate.peaks[place] for candidate in fitting)


def fullest(search: Search, budget: Budget) -> tuple[float, int, Tier]:
    """The tier that the plan that fits ``budget`` best fills most, as :func:`overrun` has it."""
    most = limits(budget)
    return min((overrun(candidate.peaks, most) for candidate in search.best), key=itemgetter(0))
