"""The forecast of a step that has been walked: its curves of memory, their peaks, and its critical path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerograph.core.files.planfile import Holding
from zerograph.core.machine import Tier
from zerograph.core.timeline import Forecast, Peak, Span, Stream
from zerograph.sim.tasks import Event, Tasks


def forecast(
    spans: tuple[Span, ...], run: Tasks, holdings: Iterable[Holding], not_counted: tuple[str, ...]
) -> Forecast:
    """The forecast of the tasks of ``run``, which ``spans`` describe, and of ``holdings``."""
    levels = run.hold_all(holdings)
    curves: dict[Tier, tuple[tuple[float, int], ...]] = {}
    peaks: dict[Tier, Peak] = {}
    for tier in sorted({*levels, *(tier for tier, events in run.events.items() if events)}):
        curves[tier], peaks[tier] = _curve(run.events[tier], levels[tier], spans)
    return Forecast(spans, curves, peaks, _critical_path(spans), not_counted)


def _curve(events: list[Event], level: int, spans: Sequence[Span]) -> tuple[tuple[tuple[float, int], ...], Peak]:
    curve = [(0.0, level)]
    peak = Peak(level, -1, "the start of the step")
    for time, _, index, size in sorted(events):
        level += size
        if curve[-1][0] == time:
            curve[-1] = (time, level)
        else:
            curve.append((time, level))
        if level > peak.bytes:
            peak = Peak(level, index, spans[index].name, spans[index].module, spans[index].source)
    return tuple(curve), peak


def _critical_path(spans: Sequence[Span]) -> tuple[int, ...]:
    """A chain of tasks from the step's end back to its start, each of which began when the one before it ended."""
    previous: list[tuple[int, ...]] = []  # on the same stream
    last: dict[Stream, int] = {}
    for span in spans:
        previous.append((last[span.stream],) if span.stream in last else ())
        last[span.stream] = span.task
    path: list[int] = []
    ending = max(spans, key=lambda span: span.end, default=None)
    while ending is not None:
        path.append(ending.task)
        before = (spans[task] for task in (*ending.after, *previous[ending.task]))
        start = ending.start
        # Equal to the last bit: a start is one of these ends, copied and never computed.
        ending = next((span for span in before if span.end == start), None)
    return tuple(reversed(path))
