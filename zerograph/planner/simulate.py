"""A discrete-event simulation of tasks on streams: when each runs, and what every tier holds meanwhile.

Tasks of one stream run in program order, one at a time; a task starts when its stream is free and all it waits for has
ended. Memory is taken when a task starts and given back when one ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx

from zerograph.core.machine import TIERS, Tier
from zerograph.core.timeline import Forecast, Peak, Span, Stream

Memory = tuple[tuple[Tier, int], ...]
"""Bytes per tier."""


def on(tier: Tier, size: int) -> Memory:
    """``size`` bytes on ``tier``."""
    return ((tier, size),) if size else ()


class Task(NamedTuple):
    """Something that occupies a stream. A tuple, as the search makes hundreds of thousands.

    Attributes:
        name: for people.
        stream: where it runs.
        seconds: how long.
        after: indexes of earlier tasks that must have ended.
        takes: memory it needs from its start on.
        gives: memory that is free at its end.
        module: fully qualified name of the module it works for.
        source: the user's ``file:line``.
        key, flops: as of a :class:`~zerograph.core.timeline.Span`.
    """

    name: str
    stream: Stream
    seconds: float
    after: tuple[int, ...] = ()
    takes: Memory = ()
    gives: Memory = ()
    module: str = ""
    source: str = ""
    key: str = ""
    flops: int = 0


def simulate(tasks: Sequence[Task], held: Memory = (), not_counted: tuple[str, ...] = ()) -> Forecast:
    """Run ``tasks``, given in program order, with ``held`` memory there from the start.

    Raises:
        ValueError: a task waits for itself or a later one.
    """
    starts, ends = times(tasks)
    spans = tuple(
        Span(i, t.name, t.stream, starts[i], ends[i], t.module, t.source, t.after, t.key, t.flops)
        for i, t in enumerate(tasks)
    )
    curves: dict[Tier, tuple[tuple[float, int], ...]] = {}
    peaks: dict[Tier, Peak] = {}
    levels = _at_start(held)
    events = _events(tasks, starts, ends)
    for tier in sorted({*events, *levels}):
        curves[tier], peaks[tier] = _curve(events[tier], levels[tier], tasks)
    return Forecast(spans, curves, peaks, _critical_path(spans), not_counted)


Peaks = tuple[int, ...]
"""The most bytes that each of :data:`~zerograph.core.machine.TIERS` holds, in that order."""


def measure(tasks: Sequence[Task], held: Memory = ()) -> tuple[float, Peaks]:
    """Seconds and peak bytes of every tier that :func:`simulate` finds, at a tenth of its cost."""
    starts, ends = times(tasks)
    levels, events = _at_start(held), _events(tasks, starts, ends)
    peaks = []
    for tier in TIERS:
        level = most = levels[tier]
        for _, _, _, size in sorted(events[tier]):
            level += size
            if level > most:
                most = level
        peaks.append(most)
    return max(ends, default=0.0), tuple(peaks)


def times(tasks: Sequence[Task]) -> tuple[list[float], list[float]]:
    """When each task starts and ends."""
    free: dict[Stream, float] = {}  # when a stream's last task ends
    starts: list[float] = []
    ends: list[float] = []
    for index, task in enumerate(tasks):
        start = free.get(task.stream, 0.0)
        for before in task.after:
            if before >= index:
                raise ValueError(f"task {index} ({task.name}) waits for a later one: {task.after}")
            if ends[before] > start:
                start = ends[before]
        end = free[task.stream] = start + task.seconds
        starts.append(start)
        ends.append(end)
    return starts, ends


def _at_start(held: Memory) -> dict[Tier, int]:
    levels: dict[Tier, int] = defaultdict(int)
    for tier, size in held:
        levels[tier] += size
    return levels


_Event = tuple[float, int, int, int]
"""A moment, the order of what happens then, the task, and the bytes it takes (or gives, below zero)."""


def _events(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float]) -> dict[Tier, list[_Event]]:
    # What ends at a moment gives back before what starts then takes; only what has no length takes first.
    events: dict[Tier, list[_Event]] = defaultdict(list)
    late = len(tasks) * 2
    for index, task in enumerate(tasks):
        start, end = starts[index], ends[index]
        for tier, size in task.takes:
            events[tier].append((start, 2 * index if end == start else late, index, size))
        for tier, size in task.gives:
            events[tier].append((end, 2 * index + 1, index, -size))
    return events


def _curve(events: list[_Event], level: int, tasks: Sequence[Task]) -> tuple[tuple[tuple[float, int], ...], Peak]:
    curve = [(0.0, level)]
    peak = Peak(level, -1, "the start of the step")
    for time, _, index, size in sorted(events):
        level += size
        if curve[-1][0] == time:
            curve[-1] = (time, level)
        else:
            curve.append((time, level))
        if level > peak.bytes:
            peak = Peak(level, index, tasks[index].name, tasks[index].module, tasks[index].source)
    return tuple(curve), peak


def _critical_path(spans: Sequence[Span]) -> tuple[int, ...]:
    """The longest chain of tasks that wait for one another: for those in ``after``, and for their stream's last one."""
    if not spans:
        return ()
    graph = nx.DiGraph()
    graph.add_node("end")
    last: dict[Stream, int] = {}
    for span in spans:
        graph.add_edge(span.task, "end", weight=span.end - span.start)
        for before in (*span.after, *([last[span.stream]] if span.stream in last else [])):
            graph.add_edge(before, span.task, weight=spans[before].end - spans[before].start)
        last[span.stream] = span.task
    return tuple(nx.dag_longest_path(graph, weight="weight")[:-1])
