"""A step of a GPT under the plan that one row of an estimate stands for: bytes per tier, seconds per stream.

Nothing is searched. The row says what lives where, which activations are kept and in how many tiles large operators
run; buckets are those of the rules. The plan's coarse programs are simulated as those of the search are. A step of many
equal layers is simulated at two smaller depths (:mod:`~zerograph.planner.programs.depths`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from zerograph.core.files.planfile import Holding
from zerograph.core.garbage import without_gc
from zerograph.core.machine import TIERS, Machine, Tier, offload_tier
from zerograph.core.param_bytes import sizes_of_states
from zerograph.core.plan import Bucket, Plan
from zerograph.core.slots import SLOTS
from zerograph.core.step import KIND_NAMES, Step
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.strategy import Strategy
from zerograph.planner.estimate.synthetic import gpt
from zerograph.planner.estimate.training import Training
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import Head, head_of, tiled, with_loss_tiles
from zerograph.planner.profile.regions import Profile, profile
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.depths import continued, peaks_by_part
from zerograph.planner.programs.micro_batches import earlier_passes, gradients_left
from zerograph.planner.programs.placement import between_steps
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.decisions import with_tiles
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate, walk
from zerograph.sim.tasks import Tasks

Numbers = Mapping[tuple[object, ...], float]

DEPTHS = 8, 16
"""Layers that are simulated of a model that has more."""


@dataclass(frozen=True, slots=True)
class Need:
    """``bytes`` that one rank needs on ``tier`` for ``item``."""

    tier: Tier
    item: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step of one rank.

    Attributes:
        passes, update: seconds in which each stream works, in forwards and backwards and in the update.
        lengths: seconds of the two, one after the other.
        peaks: the most bytes that each tier holds.
    """

    passes: Mapping[str, float]
    update: Mapping[str, float]
    lengths: tuple[float, float]
    peaks: Mapping[Tier, int]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.lengths)

    @property
    def bound(self) -> str:
        """The stream that works longest in the longer part."""
        streams = self.passes if self.lengths[0] >= self.lengths[1] else self.update
        return max(streams, key=streams.__getitem__)


@dataclass(frozen=True, slots=True)
class Preset:
    """The plan of one row: what is trained, how, on how many ranks of which machine, and what the row says."""

    size: ModelSize
    training: Training
    machine: Machine
    world_size: int
    strategy: Strategy

    @property
    def held(self) -> Mapping[Tier, int]:
        """Bytes that each tier holds between steps: a step needs more."""
        found = self._continued(_held)
        return {tier: round(found["held", tier]) for tier in TIERS}

    @property
    def outcome(self) -> Outcome:
        """The step, simulated."""
        found = self._continued(_measured)
        passes, update = (
            {str(k[2]): s for k, s in found.items() if k[:2] == ("busy", part)} for part in ("passes", "update")
        )
        peaks = {tier: round(max(_parts(found, tier))) for tier in TIERS}
        return Outcome(passes, update, (found["length", "passes"], found["length", "update"]), peaks)

    @property
    def needs(self) -> tuple[Need, ...]:
        """The uses of each tier's bytes when it holds the most; they add up to its peak."""
        kinds, peaks, needs = self._continued(_by_kind), self._continued(_measured), list[Need]()
        for tier in TIERS:
            parts = _parts(peaks, tier)
            fullest = parts.index(max(parts))
            sizes = {str(k[2]): round(size) for k, size in kinds.items() if k[:2] == (tier, fullest)}
            if sizes:
                sizes[max(sizes, key=sizes.__getitem__)] += round(max(parts)) - sum(sizes.values())  # rounded bytes
            needs += [Need(tier, kind, size) for kind, size in sizes.items() if size]
        return tuple(needs)

    def _continued(self, of: Callable[[Preset, int], Numbers]) -> Numbers:
        """Numbers of the step; those of a deep model continue what two depths have."""
        size, depth = self.size, self.size.layers
        with without_gc():
            few, many = DEPTHS
            if depth <= many:
                return of(self, depth)
            # So that models of all depths are one, and simulated once; but not where the number of parameters was
            # given.
            one = self if size.parameters != size.formula else replace(self, size=size.with_layers(many))
            less, more = of(one, few), of(one, many)
        times = (depth - many) / (many - few)
        return {key: continued(less.get(key, 0.0), more[key], times) for key in more}


def _parts(found: Numbers, tier: Tier) -> list[float]:
    """By part of the step, the most that ``tier`` holds."""
    return [size for key, size in found.items() if key[:2] == ("peak", tier)]


@lru_cache(maxsize=16)
def _profile(
    size: ModelSize, training: Training, world_size: int, layers: int, sharded: bool, tiles: int
) -> tuple[Step, Profile, Head | None]:
    """The step, divided, with its loss in ``tiles``."""
    graph = Graph(gpt(size, training, world_size, layers, sharded=sharded))
    head = head_of(graph) if tiles > 1 else None
    return graph.step, profile(graph if head is None else tiled(graph.step, head, tiles), "none"), head


@lru_cache(maxsize=32)
def _scheduler(preset: Preset, layers: int, sharded: bool, moments: int) -> Scheduler:
    """The scheduler of plans that differ in where what lives; it is asked with a preset that says nothing of it."""
    size, training, machine, world, strategy = (
        preset.size, preset.training, preset.machine, preset.world_size, preset.strategy,
    )  # fmt: skip
    step, profiled, _ = _profile(size, training, world, layers, sharded, strategy.tiles)
    buckets = plan_step(step, stage=3, world_size=world, bucket_size=training.bucket_size, prefetch=0).buckets
    rates = Rates(machine, world, training.dtype)
    return Scheduler(profiled, [b.params for b in buckets], [b.name for b in buckets], rates, moments)


@lru_cache(maxsize=16)
def _planned(preset: Preset, layers: int) -> tuple[Scheduler, Plan, tuple[Holding, ...]]:
    """The plan of the first ``layers``, and what lies on each tier between steps, or micro-batches."""
    training, world, strategy = preset.training, preset.world_size, preset.strategy
    stage, placement, activations = strategy.stage, strategy.placement, strategy.activations
    sharded = stage > 0 and (world > 1 or strategy.tier != "device")
    step, _, head = _profile(preset.size, training, world, layers, sharded, strategy.tiles)
    plan = plan_step(
        step, stage=stage, world_size=world, bucket_size=training.bucket_size, prefetch=training.prefetch,
        recompute="full" if strategy.recomputes else "none", placement=placement,
        saved=offload_tier(activations), hosts=preset.machine.hosts(world),
    )  # fmt: skip
    plan = with_tiles(plan, {bucket.index: _tiles(bucket, preset) for bucket in plan.buckets if stage == 3})
    if head is not None:
        plan = with_loss_tiles(plan, head, strategy.tiles)
    moments = training.moments(sharded and (stage < 3 or placement.parameters != placement.optimizer))
    scheduler = _scheduler(replace(preset, strategy=Strategy(0, tiles=strategy.tiles)), layers, sharded, moments)
    held = (
        *between_steps(plan, sizes_of_states(step.params, moments), scheduler.rates.staging),
        *(gradients_left(plan) if preset.training.accumulate > 1 else ()),
    )
    return scheduler, plan, held


def _tiles(bucket: Bucket, preset: Preset) -> int:
    """As many as make a parameter fit the size of buckets, if it may be so many."""
    if len(bucket.params) > 1 or not bucket.params[0].sharded:
        return 1
    most = bucket.params[0].chunk
    return min(preset.strategy.tiles, -(-bucket.gathered_bytes // preset.training.bucket_size), most)


@lru_cache(maxsize=256)
def _held(preset: Preset, layers: int) -> Numbers:
    _, _, held = _planned(preset, layers)
    return {("held", tier): sum(one.bytes for one in held if one.tier == tier) for tier in TIERS}


@lru_cache(maxsize=256)
def _measured(preset: Preset, layers: int) -> Numbers:
    """Peaks by part; how long streams work, and passes and update take."""
    scheduler, plan, holdings = _planned(preset, layers)
    accumulate = preset.training.accumulate
    run = walk(coarse_programs(scheduler, plan, SLOTS, adds=accumulate > 1), scheduler.shared.costs)
    held = tuple((holding.tier, holding.bytes) for holding in holdings)
    found: dict[tuple[object, ...], float] = {
        ("peak", tier, part): size
        for tier, parts in zip(TIERS, peaks_by_part(run, held), strict=True)
        for part, (size, _) in enumerate(parts)
    }
    passes, end = max(run.ends[: run.programs[2]]), max(run.ends)
    found |= {("length", "passes"): passes, ("length", "update"): end - passes}
    _add_busy(found, "passes", run, 0, run.programs[2])
    _add_busy(found, "update", run, run.programs[2], len(run.ends))
    # The passes of the last micro-batch are those above; the first one finds no gradients that it adds to.
    for adds, times in ((False, min(accumulate - 1, 1)), (True, accumulate - 2)):
        if times > 0:
            programs = coarse_programs(scheduler, plan, SLOTS, adds=adds)[:2]
            again = walk(earlier_passes(programs, plan), scheduler.shared.costs)
            _add_busy(found, "passes", again, 0, len(again.ends), times)
            found["length", "passes"] += times * max(again.ends)
    return found


def _add_busy(
    found: dict[tuple[object, ...], float], part: str, run: Tasks, begin: int, end: int, times: int = 1
) -> None:
    for task in range(begin, end):
        key = ("busy", part, run.streams[task])
        found[key] = found.get(key, 0.0) + times * (run.ends[task] - run.starts[task])


def _by_kind(preset: Preset, layers: int) -> Numbers:
    """By tier and part, what is held of each kind when the most is."""
    scheduler, plan, held = _planned(preset, layers)
    programs = coarse_programs(scheduler, plan, SLOTS, adds=preset.training.accumulate > 1)
    run, (_, holdings) = walk(programs, scheduler.shared.costs), simulate(programs, scheduler.rates, held=held)
    peaks = peaks_by_part(run, tuple((one.tier, one.bytes) for one in held))
    found: dict[tuple[object, ...], float] = {}
    for kind, name in KIND_NAMES.items():
        run.events = {tier: [] for tier in TIERS}
        before = run.hold_all(one for one in holdings if one.kind == kind)
        for tier, parts in zip(TIERS, peaks, strict=True):
            for part, (_, moment) in enumerate(parts):
                taken = sum(size for *key, size in run.events[tier] if tuple(key) <= moment)
                found[tier, part, name] = before.get(tier, 0) + taken
    return found
