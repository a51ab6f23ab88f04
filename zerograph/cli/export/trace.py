"""Chrome's trace format, for ui.perfetto.dev and chrome://tracing: a row per stream, a counter per tier, arrows.

With a run they are three processes: the forecast, the forecast with the run's seconds, and what happened.

The format is described in "Trace Event Format" (Google). Times in it are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerograph.cli.export.labels import STREAM_NAMES, streams_used, tiers_used
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.machine import TIER_NAMES
from zerograph.core.timeline import Forecast, Span, Stream

Event = dict[str, Any]


def write(file: PlanFile, path: Path, beside: Beside | None = None) -> None:
    """Write the forecast as a trace, and what is laid beside it.

    Raises:
        OSError: ``path`` cannot be written.
    """
    about = {"model": file.model, "machine": file.machine.name, "digest": file.digest}
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_all(file, beside))}
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def _all(file: PlanFile, beside: Beside | None) -> Iterator[Event]:
    parts = [(f"one step of {file.model}", file.forecast)]
    if beside is not None:
        parts += [(f"{file.model}, re-timed", beside.retimed), (f"{file.model}, measured", beside.measured)]
    for process, (name, forecast) in enumerate(parts, 1):
        for event in _events(name, forecast, process):
            yield {**event, "pid": process}


def _events(name: str, forecast: Forecast, process: int) -> Iterator[Event]:
    """The events of one process, which they do not name."""
    threads = {stream: row for row, stream in enumerate(streams_used(forecast), 1)}
    yield from _names(name, threads)
    critical = set(forecast.critical_path)
    for span in forecast.spans:
        yield _slice(span, threads[span.stream], span.task in critical)
    yield from _counters(forecast)
    yield from _arrows(forecast, threads, process)


def _names(name: str, threads: dict[Stream, int]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    for stream, thread in threads.items():
        about = {"ph": "M", "tid": thread}
        yield {**about, "name": "thread_name", "args": {"name": STREAM_NAMES[stream]}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(span: Span, thread: int, critical: bool) -> Event:
    args = {"task": span.task, "module": span.module, "source": span.source, "critical": critical}
    where = {"tid": thread, "ts": _microseconds(span.start)}
    # Of the rounded moments: a slice that ends a digit later than the next begins would be drawn inside of that.
    length = _microseconds(span.end) - _microseconds(span.start)
    return {"ph": "X", "name": span.name, "cat": span.stream, **where, "dur": round(length, 3), "args": args}


def _counters(forecast: Forecast) -> Iterator[Event]:
    for tier in tiers_used(forecast):
        for time, size in forecast.memory[tier]:
            where = {"ph": "C", "ts": _microseconds(time)}
            yield {**where, "name": f"{TIER_NAMES[tier]} memory", "args": {"bytes": size}}


def _arrows(forecast: Forecast, threads: dict[Stream, int], process: int) -> Iterator[Event]:
    """From each gather to each computation that waits for it."""
    number = 0
    for span in forecast.spans:
        for gather in (forecast.spans[i] for i in span.after if span.stream == "compute"):
            if gather.stream != "gather":
                continue
            number += 1
            flow = {"name": "gathered", "cat": "gather", "id": f"{process}.{number}"}  # one of the whole file
            # An arrow belongs to the slice that encloses its moment; a slice's end is outside of it.
            yield {**flow, "ph": "s", "tid": threads["gather"], "ts": _microseconds(gather.start)}
            yield {**flow, "ph": "f", "bp": "e", "tid": threads["compute"], "ts": _microseconds(span.start)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
