"""Why no plan of a step fits: need and have, the moment and what is held then, and which knob would help how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerograph.errors import InfeasibleError
from zerograph.forecast import Forecast, Span
from zerograph.ir import Step
from zerograph.machine import Machine
from zerograph.planner.regions import Life
from zerograph.planner.search import BUCKET_SIZES, Search, Wish
from zerograph.planner.shortage import Knob
from zerograph.planner.simulate import simulate
from zerograph.units import format_bytes


def infeasible(search: Search, step: Step, machine: Machine, budget: int) -> InfeasibleError:
    """The error for a ``search`` of ``step`` that found nothing within ``budget`` bytes."""
    need = search.smallest.peak
    forecast = simulate(search.smallest.space.scheduler.tasks(search.smallest.plan), (("device", search.states),))
    knobs = sorted(_knobs(search, step, machine, budget), key=lambda knob: (not knob.fits, -knob.saves))
    lines = [str(knob) for knob in knobs if knob.saves > 0]
    lines.append(f"{format_bytes(need - budget)} more memory")
    return InfeasibleError(
        f"the step needs {format_bytes(need)} of device memory per rank at least and may use {format_bytes(budget)}, "
        f"the reserve taken off\n{_moment(search, forecast)}",
        "what would help: " + "; ".join(lines),
    )


def _moment(search: Search, forecast: Forecast) -> str:
    peak = forecast.peaks["device"]
    states = f"{format_bytes(search.states)} of shards and optimizer states"
    if peak.task < 0:
        return f"it holds {states} before it begins"
    span = _computing(forecast, peak.task)
    where = span.name + (f" ({span.source})" if span.source else "")
    rest = format_bytes(peak.bytes - search.states)
    text = f"most is held in {where}: {states}, {rest} of activations, gradients and gathered parameters"
    life = _largest(search, span)
    if life is None:
        return text
    source = f" ({life.source})" if life.source else ""
    return f"{text}, of which {format_bytes(life.bytes)} are {life.name}{source} and what lives as long"


def _computing(forecast: Forecast, task: int) -> Span:
    """The compute task that runs when ``task`` starts; ``task`` itself when none does."""
    at = forecast.spans[task].start
    running = [s for s in forecast.spans if s.stream == "compute" and s.start <= at < s.end]
    return running[0] if running else forecast.spans[task]


def _largest(search: Search, span: Span) -> Life | None:
    """What takes the most of what lives through the compute task ``span`` under the smallest plan."""
    smallest = search.smallest
    alive = smallest.space.scheduler.alive(span.name, smallest.recomputed, smallest.space.plan.save_others)
    return max(alive, key=lambda life: life.bytes, default=None)


def _knobs(search: Search, step: Step, machine: Machine, budget: int) -> Iterator[Knob]:
    """Every single change of what the user fixed, and a larger world."""
    need = search.smallest.peak
    for text, changed, states in _changes(search):
        after = Search(step, changed, machine, states=states).smallest.peak
        yield Knob(text, need - after, after <= budget)
    work = (need - search.states) // 2
    yield Knob("half the batch, if activations shrink with it", work, need - work <= budget)


def _changes(search: Search) -> Iterator[tuple[str, Wish, int]]:
    wish, states = search.wish, search.states
    if wish.recompute not in ("auto", "full"):
        yield 'recompute="full"', replace(wish, recompute="full"), states
    if wish.stage in (1, 2):
        yield 'stage="auto"', replace(wish, stage="auto"), states
    if wish.bucket_size is not None and wish.bucket_size > BUCKET_SIZES[0]:
        size = BUCKET_SIZES[0]
        yield f'bucket_size="{format_bytes(size).replace(" ", "")}"', replace(wish, bucket_size=size), states
    if wish.prefetch:
        yield "prefetch=0", replace(wish, prefetch=0), states
    if wish.stage != 0:
        more = 2 * wish.world_size
        yield f"world size {more}", replace(wish, world_size=more), states // 2
