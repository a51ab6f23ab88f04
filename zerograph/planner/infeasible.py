"""Why no plan of a step fits: which tier is short, when, what is held then, and which knob would help how much.

The plan that is told about is the one that overruns its tiers by the smallest share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zerograph.errors import InfeasibleError
from zerograph.forecast import Forecast, Peak, Span
from zerograph.ir import Step
from zerograph.machine import TIERS, Machine, Tier
from zerograph.planfile import Holding
from zerograph.planner.books import scheduled
from zerograph.planner.candidates import Candidate
from zerograph.planner.choice import OFFLOADS, Offload
from zerograph.planner.offloading import WORK
from zerograph.planner.regions import Life
from zerograph.planner.search import BUCKET_SIZES, Search, Wish, limits
from zerograph.planner.shortage import Knob
from zerograph.units import format_bytes

_WORK = WORK // 10
"""Tasks that are simulated for each knob: a few plans, as only the smallest counts."""
_PLANNED = " (can be planned, not run yet)"

Budget = int | Mapping[Tier, int]


def infeasible(search: Search, step: Step, machine: Machine, budget: Budget) -> InfeasibleError:
    """The error for a ``search`` of ``step`` that found nothing within ``budget`` bytes, of the device or per tier."""
    closest, most = search.closest(budget), limits(budget)
    short = max(range(len(TIERS)), key=lambda i: (closest.peaks[i] - most[i]) / max(1, most[i]))
    tier, need, have = TIERS[short], closest.peaks[short], most[short]
    knobs = sorted(_knobs(search, step, machine, budget, short), key=lambda knob: (not knob.fits, -knob.saves))
    lines = [str(knob) for knob in knobs if knob.saves > 0 or knob.fits]
    lines.append(f"{format_bytes(need - have)} more {'' if tier == 'device' else f'{tier} '}memory")
    return InfeasibleError(
        f"the step needs {format_bytes(need)} of {tier} memory per rank at least and may use {format_bytes(have)}, "
        f"the reserve taken off\n{_moment(search, closest, tier)}",
        "what would help: " + "; ".join(lines),
    )


def _moment(search: Search, found: Candidate, tier: Tier) -> str:
    forecast, holdings = scheduled(found.space.scheduler, found.plan)
    peak = forecast.peaks[tier]
    if tier != "device":
        return _elsewhere(forecast, holdings, peak, tier)
    held = found.held
    states = f"{format_bytes(held)} of shards and optimizer states"
    if peak.task < 0:
        return f"it holds {states} before it begins"
    span = _computing(forecast, peak.task)
    where = span.name + (f" ({span.source})" if span.source else "")
    rest = format_bytes(found.peak - held)
    text = f"most is held in {where}: {states}, {rest} of activations, gradients and gathered parameters"
    life = _largest(found, span)
    if life is None:
        return text
    source = f" ({life.source})" if life.source else ""
    return f"{text}, of which {format_bytes(life.bytes)} are {life.name}{source} and what lives as long"


def _elsewhere(forecast: Forecast, holdings: tuple[Holding, ...], peak: Peak, tier: Tier) -> str:
    """The moment at which ``tier`` holds the most, and what takes most of it."""
    at = 0.0 if peak.task < 0 else forecast.spans[peak.task].start
    there = [h for h in holdings if h.tier == tier and h.held_at(at, forecast.spans)]
    kinds = {kind: sum(h.bytes for h in there if h.kind == kind) for kind in dict.fromkeys(h.kind for h in there)}
    held = ", ".join(f"{format_bytes(size)} of {_WORDS[kind]}" for kind, size in sorted(kinds.items(), key=_most))
    largest = max(there, key=lambda h: h.bytes)
    return f"most is held in {peak.name}: {held}; the largest is {largest.name} with {format_bytes(largest.bytes)}"


def _most(item: tuple[str, int]) -> int:
    return -item[1]


_WORDS = {
    "param": "parameters",
    "state": "optimizer states",
    "gradient": "gradients",
    "activation": "activations",
    "gathered": "gathered parameters",
    "temporary": "temporaries",
}


def _computing(forecast: Forecast, task: int) -> Span:
    """The compute task that runs when ``task`` starts; ``task`` itself when none does."""
    at = forecast.spans[task].start
    running = [s for s in forecast.spans if s.stream == "compute" and s.start <= at < s.end]
    return running[0] if running else forecast.spans[task]


def _largest(found: Candidate, span: Span) -> Life | None:
    """What takes the most of what lives through the compute task ``span``."""
    alive = found.space.scheduler.alive(span.name, found.recomputed, found.space.plan.save_others)
    return max(alive, key=lambda life: life.bytes, default=None)


def _knobs(search: Search, step: Step, machine: Machine, budget: Budget, short: int) -> Iterator[Knob]:
    """Every single change of what the user fixed, and a larger world."""
    closest = search.closest(budget)
    for text, changed, states in _changes(search, machine):
        after = Search(step, changed, machine, states=states, work=_WORK)
        less = closest.peaks[short] - after.closest(budget).peaks[short]
        yield Knob(text, less, after.within(budget) is not None)
    if TIERS[short] == "device":
        work = (closest.peak - closest.held) // 2
        yield Knob("half the batch, if activations shrink with it", work, closest.peak - work <= limits(budget)[0])


def _changes(search: Search, machine: Machine) -> Iterator[tuple[str, Wish, int]]:
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
    for text, changed in _placements(wish, machine):
        yield text + _PLANNED, changed, states


def _placements(wish: Wish, machine: Machine) -> Iterator[tuple[str, Wish]]:
    """Every other offload, to each tier there is, and tiles."""
    if wish.offload == "none" and not wish.tiles and wish.sharding == 3:
        yield "tiling of large operators", replace(wish, tile=True)
    if wish.offload == "auto":
        if wish.tier is not None:
            yield "offload to any tier", replace(wish, tier=None)
        return
    kinds: list[Offload] = [kind for level, kind in enumerate(OFFLOADS) if 0 < level <= wish.sharding]
    for tier in TIERS[1:]:
        for kind in kinds if machine.capacity(tier, wish.world_size) else ():
            if (kind, tier) != (wish.offload, wish.tier):
                yield f'offload="{kind}", tier="{tier}"', replace(wish, offload=kind, tier=tier)
