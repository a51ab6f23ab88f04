"""How much longer a step takes, and how much more it holds, with more layers: read inside one simulation of a few.

Tasks of equal layers follow each other in the same order, so a task has a twin one period of layers before it. If the
step waits for the task, the time between the ends of both is what one more period takes. The bytes that the tasks of a
period take, and do not give back, are what one more period holds from there on.

Forward, backward and update each go through all layers once, as do updates of the step before that begin ahead of a
forward. Each of these is a section of the step, and grows by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from zerograph.core.instructions import Compute, Move
from zerograph.core.machine import TIERS, Tier
from zerograph.sim.costs import COMPUTE, GATHER, Fact
from zerograph.sim.tasks import Tasks

PERIODS = 4
"""Periods that are simulated. The first and the last also do what happens at the ends of a step."""


class Section(NamedTuple):
    """Tasks that go through all layers once.

    Attributes:
        begin: the first task.
        middle: the task behind which added periods have changed the level of memory.
        period: tasks that have a twin, ``shift`` tasks earlier; empty where nothing is done for each period.
        adds: tasks that take and give in sum what one more period does.
    """

    begin: int
    middle: int
    period: range
    shift: int
    adds: frozenset[int]


class Layers(NamedTuple):
    """The layers of a shortened step, which come in :data:`PERIODS` periods.

    Attributes:
        number: of each layer, by name.
        of_bucket: the number of the layer that a bucket belongs to.
    """

    number: Mapping[str, int]
    of_bucket: Mapping[int, int]


def sections_of(run: Tasks, layers: Layers, prefetch: int, fetch_ahead: int) -> list[Section]:
    """The sections of a step.

    Args:
        prefetch: buckets that are gathered ahead.
        fetch_ahead: layers whose activations are fetched ahead.
    """
    gathered = -(-prefetch * len(layers.number) // max(1, len(layers.of_bucket)))
    return [_section(run.facts, layers, begin, end, gathered, fetch_ahead) for begin, end in _stretches(run)]


def _stretches(run: Tasks) -> Iterator[tuple[int, int]]:
    """The first task of each section, and one past the last."""
    facts = run.facts
    for begin, end in pairwise((*run.programs, len(facts))):
        works = next((task for task in range(begin, end) if facts[task].role in (COMPUTE, GATHER)), begin)
        if begin < works and any(type(facts[task].instruction) is Compute for task in range(works, end)):
            yield begin, works
            begin = works
        yield begin, end


def _section(facts: Sequence[Fact], layers: Layers, begin: int, end: int, gathered: int, fetch_ahead: int) -> Section:
    cuts = _cuts(facts, layers, begin, end)
    if not cuts:
        return Section(begin, end, range(0), 0, frozenset())
    periods = [range(a, b) for a, b in pairwise(cuts)]
    # A period as long as the one before has the same tasks. Else it misses some that come from far ahead, and the last
    # tasks of the first period have their twins before it all the same.
    period = periods[len(periods[0]) == len(periods[1])]
    adds = {task for task in _steady(periods, gathered) if _gathers(facts[task])}
    adds.update(task for task in _steady(periods, fetch_ahead) if _fetches_activations(facts[task]))
    # All else follows the compute, as gradients that leave some reductions later, and is steady in the last period.
    adds.update(task for task in periods[-1] if not (_gathers(facts[task]) or _fetches_activations(facts[task])))
    return Section(begin, cuts[2], period, len(period), frozenset(adds))


def _cuts(facts: Sequence[Fact], layers: Layers, begin: int, end: int) -> list[int]:
    """The tasks behind the first layer of each period; none where not all periods are there.

    They are that far from both ends of the step because something is gathered and fetched ahead.
    """
    ends = {layers.number.get(fact.instruction.module): task for task, fact in enumerate(facts[begin:end], begin + 1)
            if type(fact.instruction) is Compute}  # fmt: skip
    if not ends:
        ends = {layers.of_bucket.get(getattr(fact.instruction, "bucket", -1)): task
                for task, fact in enumerate(facts[begin:end], begin + 1)}  # fmt: skip
    ends.pop(None, None)
    # A plan may do something for one layer of each period only.
    cuts = sorted(ends.values())[:: max(1, len(ends) // PERIODS)][:PERIODS]
    return cuts if len(cuts) == PERIODS else []


def _steady(periods: Sequence[range], ahead: int) -> range:
    """The last period that is so many layers ``ahead`` of the end; a period is two layers at least."""
    return periods[max(0, len(periods) - 1 - (ahead + 1) // 2)]


def _gathers(fact: Fact) -> bool:
    instruction = fact.instruction
    return fact.role == GATHER or (isinstance(instruction, Move) and instruction.what == "shard")


def _fetches_activations(fact: Fact) -> bool:
    instruction = fact.instruction
    return isinstance(instruction, Move) and instruction.what == "activations" and instruction.rises


def critical_path(run: Tasks) -> list[int]:
    """The tasks without a pause in between that the step waits for, the last first."""
    starts, ends = run.starts, run.ends
    task = ends.index(max(ends))
    path = [task]
    while starts[task] > 0:
        # It starts when an earlier task ends.
        start, task = starts[task], task - 1
        while ends[task] != start:
            task -= 1
        path.append(task)
    return path


def seconds_per_period(run: Tasks, sections: Sequence[Section], path: Sequence[int]) -> float:
    """Seconds that a step with the critical ``path`` takes longer with one more period of layers."""
    facts, ends, seconds = run.facts, run.ends, 0.0
    for section in sections:
        for task in path:
            twin = task - section.shift
            if task in section.period and twin >= section.begin and _alike(facts[task], facts[twin]):
                seconds += ends[task] - ends[twin]
                break
    return seconds


def _alike(a: Fact, b: Fact) -> bool:
    return a.stream == b.stream and a.seconds == b.seconds


def peaks_at_depth(
    run: Tasks, sections: Sequence[Section], held: Mapping[Tier, int], more: Mapping[Tier, float], times: float
) -> tuple[int, ...]:
    """The most bytes that each tier holds with so many ``times`` a period more.

    In each section the level rises or falls steadily, so its peak lies near one end. The tasks before the added periods
    and those behind them therefore have a peak each, which grows by all that was added before it.

    Args:
        held: bytes that are there all the time.
        more: how many more these are with one more period.
    """
    bounds = [task for section in sections for task in (section.begin, section.middle)][1:]
    found = []
    for tier in TIERS:
        level = held.get(tier, 0)
        peaks, adds = [level, *[0] * len(bounds)], [0] * len(sections)
        for _, _, task, size in sorted(run.events[tier]):
            level += size
            part = bisect_right(bounds, task)
            if level > peaks[part]:
                peaks[part] = level
            if task in sections[part // 2].adds:
                adds[part // 2] += size
        growth, most = more.get(tier, 0.0), 0.0
        for part, peak in enumerate(peaks):
            growth += adds[part // 2] if part % 2 else 0
            # No task of a part without a peak takes or gives anything.
            if peak:
                most = max(most, peak + growth * times)
        found.append(round(most))
    return tuple(found)
