"""Plans of a deep step, judged by few of its layers.

A plan says what :data:`PERIOD` layers of a run of alike ones do, and the others do the same in turn. Neighbours may
share a bucket, which does as the first of them. The plan is simulated with :data:`SIMULATED` of them. The simulation
shows how much one period more adds, which is added for every period that is left out
(:mod:`~zerograph.planner.programs.periods`). That costs as much for 1,000 layers as for eight. It tells which plans are
worth a simulation of the whole step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from zerograph.core.instructions import Update
from zerograph.core.machine import Tier
from zerograph.core.param_bytes import sizes_of_states, state_bytes
from zerograph.core.plan import Bucket, Plan, decided
from zerograph.core.step import layer_of_activation
from zerograph.planner.profile.regions import Life, Profile, Region, Work
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.periods import (
    PERIODS,
    Layers,
    critical_path,
    peaks_at_depth,
    seconds_per_period,
    sections_of,
)
from zerograph.planner.programs.placement import device_update
from zerograph.planner.search.search_space import Candidate, SearchSpace
from zerograph.sim.simulate import Peaks, walk

PERIOD = 2
"""Layers that are told apart: what half of the layers do, one of these does."""
SIMULATED = PERIOD * PERIODS
"""Layers of a run that are simulated."""
DEEP = 32
"""Layers of a run up to which a step is simulated as it is."""
MANY = 128
"""Buckets up to which it is: a simulation is then no matter of tens of milliseconds."""


class FewLayers(SearchSpace):
    """The plans of a space of many layers, as plans of few of them.

    Attributes:
        full: the space of all layers.
    """

    def __init__(self, full: SearchSpace, run: Sequence[str], beside: Sequence[FewLayers]) -> None:
        self.full = full
        half = PERIOD // 2
        few = [*run[:half], *run[-half:]]
        super().__init__(**_without(full, run[half:-half]))
        self._to_full = _Carrier(self, full, {layer: few[i % PERIOD] for i, layer in enumerate(run)})
        others = [few._simulated_space for few in beside]
        space = SearchSpace(**_without(full, run[SIMULATED - half : -half]), beside=others)
        self._simulated_space: SearchSpace = space
        layers = [*run[: SIMULATED - half], *run[-half:]]
        self._to_simulated = _Carrier(self, space, {layer: few[i % PERIOD] for i, layer in enumerate(layers)})
        number, own = {layer: i for i, layer in enumerate(layers)}, _by_layer(space)
        self._layers = Layers(number, {bucket: number[layer] for layer in layers for bucket in own[layer]})
        # Those of a period in the middle are as those of every period that is left out.
        inside = range(SIMULATED // 2, SIMULATED // 2 + PERIOD)
        self._period = frozenset(bucket for bucket, layer in self._layers.of_bucket.items() if layer in inside)
        self._times = (len(run) - SIMULATED) / PERIOD
        self._updates: dict[frozenset[int], float] = {}

    def full_of(self, candidate: Candidate) -> Candidate:
        return self.full.of(self._to_full(candidate.plan))

    def _judged(self, plan: Plan) -> tuple[float, Peaks, int]:
        space, plan = self._simulated_space, self._to_simulated(plan)
        scheduler, times = space.scheduler, self._times
        programs = coarse_programs(scheduler, plan)
        run = walk(programs, scheduler.shared.costs)
        sections, path = sections_of(run, self._layers, plan.prefetch, plan.fetch_ahead), critical_path(run)
        seconds = seconds_per_period(run, sections, path)
        # One instruction updates what all layers have on the device, and grows with them.
        if any(type(run.facts[task].instruction) is Update and task >= run.programs[-1] for task in path):
            seconds += self._update_per_period(plan)
        held: dict[Tier, int] = defaultdict(int)
        for tier, size in space.held + scheduler.moved(plan):
            held[tier] += size
        peaks = peaks_at_depth(run, sections, held, self._held_per_period(plan, programs[0].given), times)
        return max(run.ends) + seconds * times, peaks, len(run.ends)

    def _update_per_period(self, plan: Plan) -> float:
        """Seconds of the update on the device that is behind the backward, of one period."""
        scheduler, buckets = self._simulated_space.scheduler, [plan.buckets[i] for i in self._period]
        host = frozenset(
            bucket.index
            for bucket in buckets
            if bucket.placement.optimizer != "device" or (plan.overlap == "backward" and plan.updated_inside(bucket))
        )
        if host not in self._updates:
            params = [own if i in self._period else () for i, own in enumerate(scheduler.buckets)]
            sizes = sizes_of_states(chain.from_iterable(params), scheduler.moments)
            self._updates[host] = scheduler.rates.seconds(device_update(params, host, sizes), ())
        return self._updates[host]

    def _held_per_period(self, plan: Plan, given: Iterable[int]) -> dict[Tier, float]:
        """By tier the bytes of one period that are there when a step begins; the registers ``given`` are, too."""
        space, found = self._simulated_space, defaultdict[Tier, float](float)
        scheduler, registers = space.scheduler, space.scheduler.registers
        for tier, size in scheduler.moved_of(plan, (plan.buckets[i] for i in self._period)).items():
            found[tier] += size
        for tier, size in self.full.held:
            found[tier] += size / self._times
        for tier, size in space.held:
            found[tier] -= size / self._times
        for register in given:
            if registers.bucket.get(register) in self._period:
                found[registers.contents[register].tier] += registers.contents[register].bytes
        return found


def by_few_layers(space: SearchSpace, beside: Sequence[FewLayers] = ()) -> FewLayers | None:
    """The same plans judged by few layers, where there are many alike; ``beside`` are those of variants of the step."""
    run = _run(space)
    return FewLayers(space, run, beside) if run else None


def _run(space: SearchSpace) -> list[str]:
    """The longest run of layers that are alike; empty where it is short, or something else stands in between."""
    profile = space.scheduler.profile
    if len(profile.layers) <= DEEP or len(space.plan.buckets) <= MANY:
        return []
    kinds = _kinds(space)
    runs = [list(members) for _, members in groupby(profile.layers, key=kinds.__getitem__)]
    run = max(runs, key=len, default=[])
    if len(run) <= DEEP:
        return []
    inside = set(run)
    for phase in ("forward", "backward"):
        places = [k for k, region in enumerate(profile.regions) if region.phase == phase and region.layer in inside]
        if places and places[-1] - places[0] + 1 != len(places):
            return []  # something else is computed in between
    return run


def _kinds(space: SearchSpace) -> dict[str, object]:
    """By layer what it computes, saves and reads, without names."""
    profile, found = space.scheduler.profile, dict[str, list[object]]()
    for layer in profile.layers:
        found[layer] = []
    for region in profile.regions:
        if region.layer in found:
            work = tuple(
                (
                    w.memory.levels,
                    w.memory.left,
                    *((a.cost, len(a.params), tuple(s for _, s in a.gradients)) for a in w.atoms),
                )
                for w in region.work
            )
            found[region.layer].append((region.phase, work))
    for life in profile.lives:
        layer = profile.regions[life.start].layer
        if layer in found:
            found[layer].append((life.bytes, tuple(life.saved)))
    reads, readers = _reads(space)
    place = {layer: k for k, layer in enumerate(profile.layers)}
    for layer in profile.layers:
        for bucket in reads[layer]:
            (part,), by = space.scheduler.bucket_parts(bucket, 1), readers[bucket]
            # Of a bucket that layers share, how far away the others are.
            found[layer].append(
                (part.unsharded, part.shards, sorted(place.get(other, -1) - place[layer] for other in by))
            )
    return {layer: tuple(own) for layer, own in found.items()}


def _reads(space: SearchSpace) -> tuple[dict[str, list[int]], list[set[str]]]:
    """By layer the buckets that it reads, the first first; and by bucket the layers that read it, of which the empty
    string stands for what is in none."""
    scheduler = space.scheduler
    reads: dict[str, dict[int, None]] = {layer: {} for layer in scheduler.profile.layers}
    readers: list[set[str]] = [set() for _ in space.plan.buckets]
    for region in scheduler.profile.regions:
        for atom in region.work[0].atoms:
            for name in (*atom.params, *(name for name, _ in atom.gradients)):
                bucket = scheduler.bucket_of[name]
                readers[bucket].add(region.layer)
                if region.layer in reads:
                    reads[region.layer][bucket] = None
    return {layer: list(own) for layer, own in reads.items()}, readers


def _without(space: SearchSpace, left_out: Sequence[str]) -> dict[str, Any]:
    """The arguments of the space without these layers, which follow one another."""
    scheduler, plan, gone = space.scheduler, space.plan, set(left_out)
    layers, (reads, readers) = scheduler.profile.layers, _reads(space)
    behind = layers[layers.index(left_out[-1]) + 1]
    # A bucket of the first layer that is left out and the one before goes on to the one behind, for that one's own.
    pairs = zip(reads[left_out[0]], reads[behind], strict=True)
    swapped = {b: a for a, b in pairs if a != b and readers[a] - gone}
    names = {
        theirs.name: mine.name
        for b, a in swapped.items()
        for theirs, mine in zip(plan.buckets[b].params, plan.buckets[a].params, strict=True)
    }
    stay = [b for b in plan.buckets if (not readers[b.index] or readers[b.index] - gone) and b.index not in swapped]
    buckets = tuple(replace(bucket, index=i) for i, bucket in enumerate(stay))
    dropped = [p for bucket in plan.buckets for p in bucket.params]
    kept = {p.name for bucket in stay for p in bucket.params}
    size = sum(state_bytes([p for p in dropped if p.name not in kept], scheduler.moments))
    return {
        "profile": _shortened(scheduler.profile, left_out, kept, names),
        "plan": replace(
            plan,
            buckets=buckets,
            recompute=tuple(layer for layer in plan.recompute if layer not in gone),
            save=tuple(name for name in plan.save if layer_of_activation(name) not in gone),
            token_regions=tuple(name for name in plan.token_regions if layer_of_activation(name) not in gone),
        ),
        "rates": scheduler.rates,
        "held": (*space.held, ("device", -size)),
        "moments": scheduler.moments,
        "most_tiles": tuple(space.most_tiles[bucket.index] for bucket in stay),
        "size": space.size,
    }


def _shortened(profile: Profile, left_out: Sequence[str], params: set[str], names: Mapping[str, str]) -> Profile:
    """``profile`` without some layers; parameters in ``names`` are read under the names that these have there."""
    gone, regions, layers = set(left_out), profile.regions, profile.layers
    before, after = layers[layers.index(left_out[0]) - 1], layers[layers.index(left_out[-1]) + 1]
    at: dict[tuple[str, str], list[int]] = {}
    for k, region in enumerate(regions):
        at.setdefault((region.phase, region.layer), []).append(k)
    new = {k: i for i, k in enumerate(k for k, region in enumerate(regions) if region.layer not in gone)}

    def place(k: int, start: int) -> int:
        """Where region ``k`` is now, for what was made in ``start``: of layers that are gone, the next one's."""
        if k in new:
            return new[k]
        phase, layer = regions[k].phase, regions[k].layer
        other = after if regions[start].phase == "forward" else before
        return new[at[phase, other][at[phase, layer].index(k)]]

    def moved(life: Life) -> Life:
        start = life.start
        return replace(
            life,
            start=new[start],
            read=None if life.read is None else place(life.read, start),
            saved={option: place(k, start) for option, k in life.saved.items()},
            needed={option: place(k, start) for option, k in life.needed.items()},
        )

    # What the layer behind reads is made by the one before now, and in the backward the other way round.
    values: dict[Hashable, Hashable] = {}
    for phase, by, of in ("forward", before, left_out[-1]), ("backward", after, left_out[0]):
        made, missed = (
            [life for life in profile.lives if (regions[life.start].phase, regions[life.start].layer) == (phase, layer)]
            for layer in (by, of)
        )
        for mine, theirs in zip(made, missed, strict=True):
            values |= {b: a for (a, _), (b, _) in zip(mine.members, theirs.members, strict=True)}
    stay = [k for k, layer in enumerate(layers) if layer not in gone]
    return replace(
        profile,
        regions=tuple(
            _renamed(regions[k], names, values) if regions[k].layer in (before, after) else regions[k] for k in new
        ),
        lives=tuple(moved(life) for life in profile.lives if life.start in new),
        layers=tuple(layers[k] for k in stay),
        saved_sets=tuple(profile.saved_sets[k] for k in stay),
        params=tuple(p for p in profile.params if p.name in params),
    )


def _renamed(region: Region, names: Mapping[str, str], values: Mapping[Hashable, Hashable]) -> Region:
    """``region``, reading parameters under other ``names``, and other ``values`` too."""

    def renamed(work: Work) -> Work:
        until = work.memory.until
        also = {values[value]: interval for value, interval in until.items() if value in values}
        atoms = tuple(
            replace(
                atom,
                params=tuple(names.get(name, name) for name in atom.params),
                gradients=tuple((names.get(name, name), size) for name, size in atom.gradients),
            )
            for atom in work.atoms
        )
        return replace(work, atoms=atoms, memory=replace(work.memory, until={**until, **also}))

    return replace(region, work=tuple(map(renamed, region.work)))


class _Carrier:
    """Makes plans of one space those of another, whose layers do as those of the same name, or as ``does_as`` says."""

    def __init__(self, source: SearchSpace, target: SearchSpace, does_as: Mapping[str, str]) -> None:
        self._source, self._target, self._does_as = source, target, does_as
        index = {bucket.name: bucket.index for bucket in source.plan.buckets}
        own, other = _by_layer(target), _by_layer(source)
        for layer, like in does_as.items():
            for mine, theirs in zip(own[layer], other[like], strict=True):
                index[target.plan.buckets[mine].name] = theirs
        self._like = [index[bucket.name] for bucket in target.plan.buckets]
        # A share of layers that the user wants recomputed is the rule's, layer by layer.
        scheduler = target.scheduler
        recomputed, _ = scheduler.profile.recomputed(scheduler.options(target.plan))
        self._recomputes = set(recomputed) in (set(), set(scheduler.profile.layers))
        self._made: dict[tuple[object, ...], Bucket] = {}

    def __call__(self, plan: Plan) -> Plan:
        source, does_as = self._source.scheduler, self._does_as
        base, profile = self._target.plan, self._target.scheduler.profile
        decisions = [tuple(getattr(bucket, name) for name in _OF_BUCKET) for bucket in plan.buckets]
        buckets = tuple(self._bucket(i, decisions[like]) for i, like in enumerate(self._like))
        found = {name: getattr(plan, name) for name in _OF_PLAN}
        if self._recomputes:
            now = dict(zip(source.profile.layers, source.options(plan), strict=True))
            found["recompute"], found["save"] = profile.recomputed(
                [now[does_as.get(layer, layer)] for layer in profile.layers]
            )
        offloaded: dict[str, list[tuple[str, Any]]] = {}
        for name, tier in plan.offload:
            layer = layer_of_activation(name) or name
            offloaded.setdefault(layer, []).append((name[len(layer) :], tier))
        found["offload"] = tuple(
            (layer + rest, tier)
            for layer in profile.layers
            for rest, tier in offloaded.get(does_as.get(layer, layer), ())
        )
        return replace(base, buckets=buckets, **found)

    def _bucket(self, index: int, decisions: tuple[Any, ...]) -> Bucket:
        """A bucket of the target with other decisions."""
        key = (index, decisions)
        if key not in self._made:
            own = dict(zip(_OF_BUCKET, decisions, strict=True))
            self._made[key] = replace(self._target.plan.buckets[index], **own)
        return self._made[key]


def _by_layer(space: SearchSpace) -> dict[str, list[int]]:
    """The buckets of each layer: those that it reads, but for those that one before it reads, or what is in none."""
    (reads, readers), taken = _reads(space), set[int]()
    found: dict[str, list[int]] = {}
    for layer, read in reads.items():
        found[layer] = [bucket for bucket in read if bucket not in taken and "" not in readers[bucket]]
        taken.update(read)
    return found


_OF_BUCKET = tuple(decided(Bucket))
_OF_PLAN = tuple(name for name in decided(Plan) if name not in ("buckets", "recompute", "save", "offload"))
