"""A discrete-event simulation of tasks on streams: when each runs, and what every tier holds meanwhile.

Tasks of one stream run in program order, one at a time; a task starts when its stream is free and all it waits for has
ended. Memory is taken when a task starts and given back when one ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from zerograph.forecast import Forecast, Peak, Span, Stream
from zerograph.machine import Tier

Memory = tuple[tuple[Tier, int], ...]
"""Bytes per tier."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that occupies a stream.

    Attributes:
        name: for people.
        stream: where it runs.
        seconds: how long.
        after: indexes of earlier tasks that must have ended.
        takes: memory it needs from its start on.
        gives: memory that is free at its end.
        module: fully qualified name of the module it works for.
        source: the user's ``file:line``.
    """

    name: str
    stream: Stream
    seconds: float
    after: tuple[int, ...] = ()
    takes: Memory = ()
    gives: Memory = ()
    module: str = ""
    source: str = ""


def simulate(tasks: Sequence[Task], held: Memory = (), not_counted: tuple[str, ...] = ()) -> Forecast:
    """Run ``tasks``, given in program order, with ``held`` memory there from the start.

    Raises:
        ValueError: a task waits for itself or a later one.
    """
    spans, blockers = _run(tasks)
    memory, peaks = _memory(tasks, spans, held)
    return Forecast(tuple(spans), memory, peaks, _critical_path(spans, blockers), not_counted)


def _run(tasks: Sequence[Task]) -> tuple[list[Span], list[list[int]]]:
    """When each task runs, and for each the tasks it waited for: its stream's last one, and those in ``after``."""
    last: dict[Stream, int] = {}
    spans: list[Span] = []
    blockers: list[list[int]] = []
    for index, task in enumerate(tasks):
        if any(before >= index for before in task.after):
            raise ValueError(f"task {index} ({task.name}) waits for a later one: {task.after}")
        waits = [*task.after, *([last[task.stream]] if task.stream in last else [])]
        start = max((spans[i].end for i in waits), default=0.0)
        end = start + task.seconds
        spans.append(Span(index, task.name, task.stream, start, end, task.module, task.source, task.after))
        blockers.append(waits)
        last[task.stream] = index
    return spans, blockers


def _memory(
    tasks: Sequence[Task], spans: Sequence[Span], held: Memory
) -> tuple[dict[Tier, tuple[tuple[float, int], ...]], dict[Tier, Peak]]:
    # What ends at a moment gives back before what starts then takes; only what has no length takes first.
    events: dict[Tier, list[tuple[float, int, int, int]]] = defaultdict(list)
    for index, (task, span) in enumerate(zip(tasks, spans, strict=True)):
        instant = span.end == span.start
        for tier, size in task.takes:
            events[tier].append((span.start, 2 * index if instant else len(tasks) * 2, index, size))
        for tier, size in task.gives:
            events[tier].append((span.end, 2 * index + 1, index, -size))
    start: dict[Tier, int] = defaultdict(int)
    for tier, size in held:
        start[tier] += size
    curves: dict[Tier, tuple[tuple[float, int], ...]] = {}
    peaks: dict[Tier, Peak] = {}
    for tier in sorted({*events, *start}):
        curves[tier], peaks[tier] = _curve(events[tier], start[tier], tasks)
    return curves, peaks


def _curve(
    events: list[tuple[float, int, int, int]], level: int, tasks: Sequence[Task]
) -> tuple[tuple[tuple[float, int], ...], Peak]:
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


def _critical_path(spans: Sequence[Span], blockers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The longest chain of tasks that wait for one another."""
    if not spans:
        return ()
    graph = nx.DiGraph()
    graph.add_node("end")
    for span, waits in zip(spans, blockers, strict=True):
        graph.add_edge(span.task, "end", weight=span.end - span.start)
        for before in waits:
            graph.add_edge(before, span.task, weight=spans[before].end - spans[before].start)
    return tuple(nx.dag_longest_path(graph, weight="weight")[:-1])
