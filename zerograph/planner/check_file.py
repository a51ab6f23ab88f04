"""What must be true of every planned step, checked on the plan file alone: the plan, and the tasks of its forecast.

The planner calls :func:`check_file` on what it made over all tiers; ``zerograph check`` on what somebody was handed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.planfile import PlanFile
from zerograph.core.timeline import Span, Stream
from zerograph.core.units import format_bytes
from zerograph.planner import check_tasks
from zerograph.planner.check import BEFORE, PLAN_CHECKS, Found, Violation

_NOISE = 1e-9
"""Seconds that may be lost in sums of floating-point times."""


def check_file(file: PlanFile) -> list[Violation]:
    """Everything that is wrong with ``file``, check by check; empty when nothing is."""
    return [violation for _, finder in CHECKS.values() for violation in finder(file)]


def _tasks(file: PlanFile) -> Iterator[Violation]:
    for place, span in enumerate(file.forecast.spans):
        if span.task != place:
            yield _at("tasks", span, f"{span.name} is task {span.task} in place {place}")
        if not 0 <= span.start <= span.end:
            yield _at("tasks", span, f"{span.name} runs from {span.start:g} s to {span.end:g} s")


def _streams(file: PlanFile) -> Iterator[Violation]:
    streams: dict[Stream, list[Span]] = defaultdict(list)
    for span in file.forecast.spans:
        streams[span.stream].append(span)
    for stream, spans in streams.items():
        for before, span in pairwise(spans):
            if span.start < before.end - _NOISE:
                text = f"{span.name} starts on {stream} at {span.start:g} s, {before.name} ends at {before.end:g} s"
                yield _at("streams", span, text)


def _waits(file: PlanFile) -> Iterator[Violation]:
    spans = file.forecast.spans
    for place, span in enumerate(spans):
        for task in span.after:
            if not 0 <= task < place:
                yield _at("waits", span, f"{span.name}, task {place}, waits for task {task}, which is none before it")
            elif spans[task].end > span.start + _NOISE:
                text = f"{span.name} starts at {span.start:g} s, {spans[task].name} that it waits for ends at "
                yield _at("waits", span, f"{text}{spans[task].end:g} s")


def _budget(file: PlanFile) -> Iterator[Violation]:
    for tier, curve in file.forecast.memory.items():
        budget = file.budget.get(tier, 0)
        over = next(((time, level) for time, level in curve if level > budget), None)
        peak = file.forecast.peaks.get(tier)
        before = sum(h.bytes for h in file.holdings if h.tier == tier and h.first == BEFORE)
        # First the plain case: nothing of the step has run, and no task is to blame.
        if before > budget:
            yield _at("budget", None, _too_much(tier, before, budget, "before the step"))
        elif over is not None:
            time, level = over
            yield _at("budget", _cause(file, tier, time), _too_much(tier, level, budget, f"at {time:g} s"))
        elif peak is not None and peak.bytes > budget:
            text = _too_much(tier, peak.bytes, budget, f"in {peak.name}")
            yield Violation("budget", peak.task, peak.module, peak.source, text)


def _too_much(tier: Tier, held: int, budget: int, when: str) -> str:
    more, limit = format_bytes(held - budget), format_bytes(budget)
    return f"{tier} holds {format_bytes(held)} {when}, {more} more than its budget of {limit}"


def _memory(file: PlanFile) -> Iterator[Violation]:
    for tier, curve in file.forecast.memory.items():
        for time, level in curve:
            if level < 0:
                text = f"{tier} holds {format_bytes(level)} at {time:g} s"
                yield _at("memory", _cause(file, tier, time), text)
        for (before, _), (time, _) in pairwise(curve):
            if time <= before:
                yield _at("memory", _cause(file, tier, time), f"the curve of {tier} goes from {before:g} to {time:g} s")


def _peaks(file: PlanFile) -> Iterator[Violation]:
    for tier, peak in file.forecast.peaks.items():
        highest = max((level for _, level in file.forecast.memory.get(tier, ())), default=0)
        if peak.bytes < highest:
            text = f"the peak of {tier} is {format_bytes(peak.bytes)}, its curve reaches {format_bytes(highest)}"
            yield Violation("peaks", peak.task, peak.module, peak.source, text)
        if not BEFORE <= peak.task < len(file.forecast.spans):
            text = f"the peak of {tier} is in task {peak.task} of {len(file.forecast.spans)}"
            yield Violation("peaks", BEFORE, peak.module, peak.source, text)
    for tier in file.forecast.memory.keys() - file.forecast.peaks.keys():
        yield Violation("peaks", BEFORE, "", "", f"{tier} holds memory and has no peak")


def _holdings(file: PlanFile) -> Iterator[Violation]:
    tasks = len(file.forecast.spans)
    for h in file.holdings:
        wrong = ""
        if not (BEFORE <= h.first < tasks and BEFORE <= h.last < tasks):
            wrong = f"is held from task {h.first} to {h.last}, the step has {tasks}"
        elif h.last != BEFORE and h.last < h.first:
            wrong = f"is held from task {h.first} to an earlier one, {h.last}"
        elif h.bytes < 0:
            wrong = f"holds {format_bytes(h.bytes)}"
        if wrong:
            task = h.first if 0 <= h.first < tasks else BEFORE
            yield Violation("holdings", task, h.module, h.source, f"{h.name} on {h.tier} {wrong}")


def _critical_path(file: PlanFile) -> Iterator[Violation]:
    spans, path = file.forecast.spans, file.forecast.critical_path
    unknown = [task for task in path if not 0 <= task < len(spans)]
    if unknown:
        yield Violation("critical path", BEFORE, "", "", f"task {unknown[0]} of {len(spans)} is on the critical path")
        return
    if not path:
        if file.forecast.seconds > _NOISE:
            yield Violation("critical path", BEFORE, "", "", f"the step has {len(spans)} tasks and no critical path")
        return
    chain = [spans[task] for task in path]
    if chain[0].start > _NOISE:
        yield _at("critical path", chain[0], f"it begins with {chain[0].name} at {chain[0].start:g} s, not at 0 s")
    for before, span in pairwise(chain):
        if abs(span.start - before.end) > _NOISE:
            text = f"{span.name} starts at {span.start:g} s, {before.name} before it ends at {before.end:g} s"
            yield _at("critical path", span, text)
    last, end = chain[-1], file.forecast.seconds
    if last.end < end - _NOISE:
        yield _at("critical path", last, f"it ends with {last.name} at {last.end:g} s, the step at {end:g} s")


def _at(name: str, span: Span | None, message: str) -> Violation:
    if span is None:
        return Violation(name, BEFORE, "", "", message)
    return Violation(name, span.task, span.module, span.source, message)


def _cause(file: PlanFile, tier: Tier, time: float) -> Span | None:
    """The task that changes what ``tier`` holds at ``time``: the one that takes the most, or one that ends.

    Where it has no source line, as a gather, that of what it takes stands in.
    """
    starting = {span.task: span for span in file.forecast.spans if span.start == time}
    taken = [h for h in file.holdings if h.tier == tier and h.first in starting]
    if taken:
        most = max(taken, key=lambda h: h.bytes)
        span = starting[most.first]
        return replace(span, module=span.module or most.module, source=span.source or most.source)
    ending = [span for span in file.forecast.spans if span.end == time]
    return next(iter((*starting.values(), *ending)), None)


Finder = Callable[[PlanFile], Iterator[Violation]]


def _of(name: str, finder: Callable[[PlanFile], Iterator[check_tasks.Found]]) -> Finder:
    """The violations of a check that only says where and what."""

    def found(file: PlanFile) -> Iterator[Violation]:
        for span, module, message in finder(file):
            task, source = (BEFORE, "") if span is None else (span.task, span.source)
            yield Violation(name, task, module, source, message)

    return found


def _of_plan(name: str, finder: Callable[[Plan], Iterator[Found]]) -> Finder:
    return lambda file: (Violation(name, *found) for found in finder(file.plan))


CHECKS: Mapping[str, tuple[str, Finder]] = {
    "budget": ("every tier stays within its budget at every moment", _budget),
    "memory": ("no tier ever holds less than nothing", _memory),
    "peaks": ("the peak of a tier is the highest that it holds", _peaks),
    "tasks": ("tasks stand in program order and end after they start", _tasks),
    "waits": ("tasks wait for earlier ones, and start when these have ended", _waits),
    "streams": ("tasks of one stream follow one another", _streams),
    "holdings": ("what is held is held by tasks of the step", _holdings),
    **{name: (text, _of_plan(name, finder)) for name, (text, finder) in PLAN_CHECKS.items()},
    "reductions": (
        "gradients of every bucket are reduced once, tile by tile",
        _of("reductions", check_tasks.reductions),
    ),
    "updates": ("every shard is updated once, where its states live", _of("updates", check_tasks.updates)),
    "arrivals": ("what is read has come from the tier where it lives", _of("arrivals", check_tasks.arrivals)),
    "returns": ("saved activations are back before they are read", _of("returns", check_tasks.returns)),
    "layers": ("layers that are recomputed or offloaded exist", _of("layers", check_tasks.layers)),
    "tokens": ("what is divided over tokens runs in as many tiles", _of("tokens", check_tasks.tokens)),
    "use": ("sharded parameters are gathered, and something that computes waits for it", _of("use", check_tasks.use)),
    "gathers": (
        "nothing is gathered while it is whole, and few tiles are at a time",
        _of("gathers", check_tasks.gathers),
    ),
    "critical path": ("the critical path is a chain from the step's start to its end", _critical_path),
}
"""Name of a check, what it makes sure of, and what finds the violations."""
