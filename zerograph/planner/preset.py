"""What a step of a GPT does under the plan that one row of an estimate stands for: bytes per tier, seconds per stream.

Nothing is searched. The row says what lives where, which activations are kept and in how many tiles large operators
run; buckets are those of the rules. The plan is sketched and simulated as those of the search are.

A step of many equal layers costs the same for each of them once there are enough, so a deep model is simulated at two
smaller depths, and their difference continued.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from zerograph.core.garbage import without_gc
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.param_bytes import kept_states, shard_bytes
from zerograph.core.plan import Bucket, Homes, Plan
from zerograph.core.program import Collective, Instruction, Program, Read, Register, WaitGather, WaitReduce, Write
from zerograph.core.simulate import Costs, Tasks, walk
from zerograph.core.step import ITEM_SIZE, Kind, Step
from zerograph.core.stretch import Stretch
from zerograph.planner.liveness import Graph
from zerograph.planner.loss import head_of, tiled
from zerograph.planner.placement import between_steps
from zerograph.planner.rates import Rates
from zerograph.planner.regions import Profile, profile
from zerograph.planner.rules import plan_step
from zerograph.planner.schedule import Scheduler
from zerograph.planner.sizes import ModelSize
from zerograph.planner.sketch import BUFFERS, sketch
from zerograph.planner.strategy import Strategy
from zerograph.planner.synthetic import gpt
from zerograph.planner.training import Training

Numbers = Mapping[tuple[str, ...], float]

DEEP = 16
"""Layers up to which a model is simulated as it is."""
ITEMS: Mapping[Kind, str] = {
    "param": "parameters",
    "state": "optimizer states",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "temporary": "temporaries",
}
"""What memory is used for, as people call it."""


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
        """Of the step."""
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
    def least(self) -> Mapping[Tier, int]:
        """Bytes that each tier holds between steps: a step needs more."""
        found = self._continued(_held)
        return {tier: round(sum(size for key, size in found.items() if key[0] == tier)) for tier in TIERS}

    @property
    def outcome(self) -> Outcome:
        """The step, simulated."""
        found = self._continued(_measured)
        peaks = {tier: round(max(found["peak", part, tier] for part in _PARTS)) for tier in TIERS}
        passes, update = (
            {k[2]: s for k, s in found.items() if k[:2] == ("busy", part)} for part in ("passes", "update")
        )
        return Outcome(passes, update, (found["length", "passes"], found["length", "update"]), peaks)

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the bytes of each tier are for when it holds the most; they add up to its peak."""
        found, peaks, needs = self._continued(_by_kind), self.outcome.peaks, []
        for tier in TIERS:
            by_part = ({kind: found.get((part, tier, kind), 0.0) for kind in ITEMS} for part in _PARTS)
            sizes = {kind: round(size) for kind, size in max(by_part, key=lambda part: sum(part.values())).items()}
            largest = max(sizes, key=sizes.__getitem__)
            sizes[largest] += peaks[tier] - sum(sizes.values())  # rounded bytes
            needs += [Need(tier, ITEMS[kind], size) for kind, size in sizes.items() if size]
        return tuple(needs)

    def _continued(self, of: Callable[[_Part], Numbers]) -> Numbers:
        """Numbers of the step; those of a deep model continue what two depths have."""
        layers = self.size.layers
        with without_gc():
            if layers <= DEEP:
                return of(self._part(layers))
            one, two = of(self._part(DEEP // 2)), of(self._part(DEEP))
        times = (layers - DEEP) / (DEEP - DEEP // 2)
        return {key: two[key] + (two[key] - one.get(key, 0.0)) * times for key in two}

    def _part(self, layers: int) -> _Part:
        told = self.size.parameters != self.size.formula
        size = self.size if told else self.size.with_layers(layers)  # so that all depths are of one model
        return _Part(size, self.training, self.machine, self.world_size, self.strategy, layers)


class _Part(NamedTuple):
    """The first ``layers`` of a preset."""

    size: ModelSize
    training: Training
    machine: Machine
    world_size: int
    strategy: Strategy
    layers: int


_PARTS = ("forward", "first half of the backward", "second half of the backward", "update")
"""A peak lies at one end of each: in the backward activations go and gradients come, so many per layer. Depth by depth
it stays there, where the largest of all may move from one part to another."""


class _Step:
    """The first layers of a preset, planned."""

    def __init__(self, part: _Part) -> None:
        size, training, machine, world, strategy, layers = part
        self.accumulates, self.stage = training.accumulate, strategy.stage
        sharded = strategy.stage > 0 and (world > 1 or strategy.tier != "device")
        homes = self.homes = Homes(strategy.home("parameters"), strategy.home("gradients"), strategy.home("optimizer"))
        moments = training.moments(sharded and (strategy.stage < 3 or homes.parameters != homes.optimizer))
        self.scheduler, plan = _scheduler(
            size, training, world, layers, sharded, strategy.tiles, strategy.stage, machine, moments
        )
        names = tuple(f"layers.{i}" for i in range(layers))
        tier = strategy.activations if strategy.activations in TIERS else None
        self.plan = replace(
            plan,
            buckets=tuple(replace(bucket, homes=self.homes, tiles=_tiles(bucket, part)) for bucket in plan.buckets),
            recompute=names if strategy.recomputes else (),
            offload=tuple((name, tier) for name in names) if tier else (),
            loss_tiles=strategy.tiles,
        )
        self.held: Counter[tuple[Tier, Kind]] = Counter()
        params = (param for bucket in self.plan.buckets for param in bucket.params)
        for holding in between_steps(self.plan, kept_states(params, world, moments), self.scheduler.rates.staging):
            self.held[holding.tier, holding.kind] += holding.bytes
        self.earlier = self.accumulates > 1
        if self.earlier:
            for bucket in self.plan.buckets:
                for param in bucket.params:
                    away = self.homes.spilled if param.sharded and self.stage > 1 else "device"
                    whole = param.elements * ITEM_SIZE[param.reduce_dtype]
                    self.held[away, "gradient"] += shard_bytes(param, world) if self.stage > 1 else whole

    def on(self, tier: Tier) -> int:
        """Bytes that ``tier`` holds between steps."""
        return sum(size for (at, _), size in self.held.items() if at == tier)

    def run(self, programs: Sequence[Program], kind: Kind | None = None) -> Tasks:
        """Simulate ``programs``; of their memory that of one ``kind``."""
        scheduler = self.scheduler
        if kind is None and not self.earlier:
            return walk(programs, scheduler.costs)
        contents = [self._counted(i, one, kind) for i, one in enumerate(scheduler.registers.contents)]
        segments = scheduler.segments
        if kind not in (None, "temporary"):
            segments = [replace(segment, memory=Stretch()) for segment in segments]
        masked = [replace(program, contents=contents, segments=segments) for program in programs]
        return walk(masked, Costs(scheduler.rates))

    def reading_back(self, program: Program) -> Program:
        """``program``, in which gradients are added to earlier ones where these are on NVMe: of earlier micro-batches,
        or of the same tile of a tied embedding, whose gradient is made twice."""
        instructions: list[Instruction] = []
        for each in program.instructions:
            if isinstance(each, Write) and each.what == "gradient" and (self.earlier or each.writes[0] in each.reads):
                key = ("earlier", each.bucket, each.tile, each.label)
                # Where they are added up there is memory: the staging buffer, or the reduced gradient's.
                back = self.scheduler.registers.get(key, f"earlier {each.what} of {each.label}", 0, "gradient")
                instructions.append(
                    Read(
                        "gradient", each.label, each.module, each.bytes, each.reads, (back,), (), each.bucket, each.tile
                    )
                )
                each = replace(each, reads=(*each.reads, back), dead=(*each.dead, back))
            instructions.append(each)
        return replace(program, instructions=instructions)

    def _counted(self, index: int, register: Register, kind: Kind | None) -> Register:
        """Reduced gradients are added to those of earlier micro-batches, which are there anyway."""
        bucket = self.scheduler.registers.bucket
        added = self.earlier and register.kind == "gradient" and index not in bucket
        if (added and register.tier == self.homes.spilled) or kind not in (None, register.kind):
            return replace(register, bytes=0)
        return register


def _tiles(bucket: Bucket, part: _Part) -> int:
    """As many as the strategy has, where so many are needed to make the parameter fit the size of buckets."""
    if part.strategy.stage < 3 or len(bucket.params) > 1 or not bucket.params[0].sharded:
        return 1
    most = bucket.params[0].chunk(part.world_size)
    return min(part.strategy.tiles, -(-bucket.gathered_bytes // part.training.bucket_size), most)


@lru_cache(maxsize=16)
def _profile(
    size: ModelSize, training: Training, world_size: int, layers: int, sharded: bool, tiles: int
) -> tuple[Step, Profile]:
    graph = Graph(gpt(size, training, world_size, layers, sharded=sharded))
    head = head_of(graph) if tiles > 1 else None
    return graph.step, profile(graph if head is None else tiled(graph.step, head, tiles), "none")


@lru_cache(maxsize=32)
def _scheduler(
    size: ModelSize, training: Training, world_size: int, layers: int, sharded: bool, tiles: int, stage: int,
    machine: Machine, moments: int,
) -> tuple[Scheduler, Plan]:  # fmt: skip
    """What plans that differ in homes and activations only have in common."""
    step, profiled = _profile(size, training, world_size, layers, sharded, tiles)
    size_, ahead = training.bucket_size, training.prefetch
    plan = plan_step(step, stage=stage, world_size=world_size, bucket_size=size_, prefetch=ahead, recompute="none")
    rates = Rates(machine, world_size, training.dtype)
    return Scheduler(profiled, [b.params for b in plan.buckets], [b.name for b in plan.buckets], rates, moments), plan


@lru_cache(maxsize=256)
def _held(part: _Part) -> Numbers:
    return {at: float(size) for at, size in _Step(part).held.items()}


@lru_cache(maxsize=256)
def _measured(part: _Part) -> Numbers:
    """Peaks of each part and tier; how long streams work, and passes and update take."""
    step = _Step(part)
    first = sketch(step.scheduler, step.plan, BUFFERS)
    programs = [step.reading_back(one) for one in first]
    run = step.run(programs)
    found: dict[tuple[str, ...], float] = {("peak", *at): level for at, (level, _) in _peaks(step, run).items()}
    end, more = run.programs[2], step.accumulates - 1
    passes = max(run.ends[:end])
    found["length", "passes"], found["length", "update"] = passes, max(run.ends) - passes
    _add_busy(found, "passes", run, range(end), 1)
    _add_busy(found, "update", run, range(end, len(run.ends)), 1)
    # The passes of the last micro-batch are those above; the first one finds no gradients to read back.
    for earlier, times in ((first, min(more, 1)), (programs, more - 1)):
        if times > 0:
            again = step.run([_without_collectives(one) if step.stage < 2 else one for one in earlier[:2]])
            _add_busy(found, "passes", again, range(len(again.ends)), times)
            found["length", "passes"] += times * max(again.ends)
    return found


def _add_busy(found: dict[tuple[str, ...], float], part: str, run: Tasks, tasks: Iterable[int], times: int) -> None:
    for task in tasks:
        key = ("busy", part, run.streams[task])
        found[key] = found.get(key, 0.0) + times * (run.ends[task] - run.starts[task])


def _without_collectives(program: Program) -> Program:
    """A pass of an earlier micro-batch at stages 0 and 1: whole gradients are added up, and parameters stay whole."""
    kept = [one for one in program.instructions if not isinstance(one, (Collective, WaitGather, WaitReduce))]
    return replace(program, instructions=kept)


def _peaks(step: _Step, run: Tasks) -> dict[tuple[str, Tier], tuple[int, tuple[float, int, int]]]:
    """The most bytes of each part and tier, and the event that they are reached with."""
    found: dict[tuple[str, Tier], tuple[int, tuple[float, int, int]]] = {}
    forward, backward, update = run.programs
    begins = (forward, backward, (backward + update) // 2, update)
    for tier in TIERS:
        level = step.on(tier)
        found |= {(part, tier): (level if part == "forward" else 0, (-1.0, 0, 0)) for part in _PARTS}
        for time, order, task, size in sorted(run.events[tier]):
            level += size
            at = _PARTS[bisect_right(begins, task) - 1], tier
            if level > found[at][0]:
                found[at] = level, (time, order, task)
    return found


def _by_kind(part: _Part) -> Numbers:
    """Of every kind of memory what is held when each part and tier has its peak."""
    step = _Step(part)
    programs = sketch(step.scheduler, step.plan, BUFFERS)
    peaks = _peaks(step, step.run(programs))
    found: dict[tuple[str, ...], float] = {}
    for kind in ITEMS:
        events = step.run(programs, kind).events
        for (when, tier), (_, moment) in peaks.items():
            taken = sum(size for *key, size in events[tier] if tuple(key) <= moment)
            found[when, tier, kind] = float(step.held[tier, kind] + taken)
    return found
