"""Shared parts of timeline drawings: ticks, the range of a memory curve, instructions too short to be seen alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from zerograph.core.machine import Tier
from zerograph.core.timeline import Forecast, Span

BUDGET_IN_SIGHT = 2.5
"""A budget up to this many times the peak is drawn; a larger one would press the curve flat."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Consecutive instructions of a stream, drawn as one."""

    spans: tuple[Span, ...]

    @property
    def start(self) -> float:
        """Seconds from the start of the step."""
        return self.spans[0].start

    @property
    def end(self) -> float:
        """Seconds from the start of the step."""
        return self.spans[-1].end


def bars(spans: Iterable[Span], shortest: float) -> Iterator[Bar]:
    """The spans of one stream in order; neighbours that last less than ``shortest`` seconds become one bar."""
    group: list[Span] = []
    for span in spans:
        short = span.end - span.start < shortest
        if group and not (short and span.start - group[-1].end < shortest):
            yield Bar(tuple(group))
            group = []
        group.append(span)
        if not short:
            yield Bar(tuple(group))
            group = []
    if group:
        yield Bar(tuple(group))


def time_ticks(seconds: float, count: int) -> list[float]:
    """At most about ``count`` round moments from 0 to ``seconds``."""
    if seconds <= 0:
        return [0.0]
    rough = seconds / count
    unit = 10.0 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    return [i * step for i in range(floor(seconds / step * 1.000001) + 1)]


def byte_ticks(top: int) -> list[int]:
    """At most three multiples of a power of two, above 0 and up to ``top``."""
    step = 2 ** max(0, ceil(log2(max(top, 1) / 3)))
    return list(range(step, top + 1, step))


def memory_top(forecast: Forecast, tier: Tier, budget: int) -> int:
    """The most bytes that the axis of a tier's curve shows."""
    peak = peak_bytes(forecast, tier)
    if peak <= budget <= BUDGET_IN_SIGHT * peak or 0 < budget < peak:
        return ceil(max(peak, budget) * 1.08)
    return ceil(peak * 1.15) or 1


def peak_bytes(forecast: Forecast, tier: Tier) -> int:
    """The most that the tier holds."""
    held = max((size for _, size in forecast.memory.get(tier, ())), default=0)
    return max(held, forecast.peaks[tier].bytes) if tier in forecast.peaks else held


def peak_time(forecast: Forecast, tier: Tier) -> float:
    """When the tier holds most for the first time: memory is taken when a task starts."""
    task = forecast.peaks[tier].task if tier in forecast.peaks else -1
    return forecast.spans[task].start if task >= 0 else 0.0
