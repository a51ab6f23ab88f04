"""The largest batch or sequence of a traced step that a plan exists for within a budget.

Needs only grow with either, nearly in proportion: sizes are doubled until one is too large, and what lies between is
narrowed by a straight line through the needs at its two ends. Where a line does not halve it, it is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerograph.errors import SizeError
from zerograph.planner.search import Search

MOST = 2**30
"""Sizes beyond are not tried."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The answer.

    Attributes:
        value: the largest size at which the step fits; 0 where not even 1 does.
        search: of the step at that size, or at 1.
        need: bytes that the step needs at least at ``value + 1``; None where there is no such step.
        limit: why there is none; empty where there is.
    """

    value: int
    search: Search
    need: int | None
    limit: str = ""


@dataclass(frozen=True, slots=True)
class _Tried:
    """One size: whether it fits, and what it needs at least; or why there is no step of that size."""

    fits: bool
    search: Search | None = None
    limit: str = ""

    @property
    def need(self) -> int | None:
        return self.search.smallest.peak if self.search else None


def fill(search_at: Callable[[int], Search], budget: int, start: int) -> Filled:
    """The largest size within ``budget`` bytes.

    Args:
        search_at: the candidates for the step of some size; a ``SizeError`` says that there is no such step.
        start: the size to try first.
    """
    tried: dict[int, _Tried] = {}

    def at(size: int) -> _Tried:
        if size not in tried:
            tried[size] = _try(search_at, size, budget)
        return tried[size]

    low, high = start, start + 1
    if at(start).fits:
        while low < MOST and at(high := 2 * low).fits:
            low = high
    else:
        while low >= 1 and not at(low).fits:
            low, high = low // 2, low
    if low >= 1:
        low, high = _narrow(at, low, high, budget)
    found, beyond = at(max(low, 1)), at(high)
    if found.search is None:
        raise SizeError(found.limit)
    limit = f"sizes above {MOST} were not tried" if beyond.fits else beyond.limit
    return Filled(low, found.search, None if limit else beyond.need, limit)


def _narrow(at: Callable[[int], _Tried], low: int, high: int, budget: int) -> tuple[int, int]:
    """Two sizes that follow each other, of which the first fits; nothing is known of what lies between."""
    halve = False
    while high - low > 1 and not at(high).fits:
        width, middle = high - low, (low + high) // 2
        below, above = at(low).need, at(high).need
        if not halve and below is not None and above is not None and above > below:
            middle = min(max(low + (budget - below) * width // (above - below), low + 1), high - 1)
        low, high = (middle, high) if at(middle).fits else (low, middle)
        halve = not halve and high - low > width // 2
    return low, high


def _try(search_at: Callable[[int], Search], size: int, budget: int) -> _Tried:
    try:
        search = search_at(size)
    except SizeError as error:
        return _Tried(False, limit=str(error).partition("\n\n")[0])
    return _Tried(search.within(budget) is not None, search)
