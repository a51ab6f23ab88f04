"""Seconds of calls, and what follows from them. No torch in here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from zerograph.core.machine import Link

ROUNDS = 3
"""How often everything is measured, one after another: what disturbs one round does not move the median."""
T = TypeVar("T")
_BATCH = 2e-3
"""Seconds that one sample takes at least: well above the clock's and the synchronization's own."""


def seconds_of(call: Callable[[], object], finish: Callable[[], None], budget: float) -> float:
    """Median seconds of ``call``, tried for ``budget`` seconds; ``finish`` waits for a device."""
    _batch(call, finish, 1)
    count = max(1, round(_BATCH / _batch(call, finish, 1)))
    samples: list[float] = []
    end = time.perf_counter() + budget
    while not samples or time.perf_counter() < end:
        samples.append(_batch(call, finish, count) / count)
    return statistics.median(samples)


def _batch(call: Callable[[], object], finish: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    finish()
    return max(time.perf_counter() - begin, 1e-9)


def median_of(rounds: Sequence[T]) -> T:
    """The median of numbers; of mappings and dataclasses (links) that of each part; what are no numbers is the same."""
    first: Any = rounds[0]
    if isinstance(first, int | float):
        return statistics.median(rounds)  # type: ignore[type-var, return-value]
    if isinstance(first, Mapping):
        return {key: median_of([each[key] for each in rounds]) for key in first}  # type: ignore[return-value, index]
    if hasattr(first, "__dataclass_fields__"):
        parts = {f.name: median_of([getattr(each, f.name) for each in rounds]) for f in fields(first)}
        return type(first)(**parts)  # type: ignore[no-any-return]
    return first  # type: ignore[no-any-return]


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The link that best explains ``(bytes, seconds)`` samples.

    Least squares of the relative error, so that small transfers, which show the latency, count as much as large ones.
    A latency is never negative; a rate is at most that of the fastest sample where the fit has no slope.
    """
    # Minimizes sum((latency * w + slope * bytes * w - 1)^2) with w = 1 / seconds.
    rows = [(1 / seconds, size / seconds) for size, seconds in samples]
    aa, ab, bb = (sum(p[i] * p[j] for p in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(p[0] for p in rows), sum(p[1] for p in rows)
    determinant = aa * bb - ab * ab
    # Samples of one size cannot tell a latency from a rate.
    if determinant > 1e-12 * aa * bb:
        latency, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if latency >= 0 and slope > 0:
            return Link(1 / slope, latency)
    return Link(bb / b, 0.0) if (a * bb - b * ab) <= 0 else Link(max(size / s for size, s in samples), 0.0)
