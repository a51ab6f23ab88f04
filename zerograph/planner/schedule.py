"""A candidate plan as tasks for the simulation, before anything is partitioned or lowered.

It follows what the passes, the lowering and the executor will do, at the grain of one compute task per layer and
visit of a bucket. ``zerograph.outlook`` does the same from the programs that will really run; tests hold one against
the other. Coarser here: what is saved follows :mod:`~zerograph.planner.liveness`, memory of a layer that a plan cuts
in several is taken with its first part, and several short layers are not merged into one segment.

What plans of the same buckets, tiles, prefetch and recomputation share is worked out here, once, because the search
changes residencies and homes hundreds of times; :mod:`~zerograph.planner.run` makes the tasks of one plan from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from zerograph.core.machine import Tier
from zerograph.core.plan import Homes, Plan, Residency
from zerograph.core.step import Param, Phase
from zerograph.planner.rates import Rates
from zerograph.planner.regions import Atom, Life, Profile, Region
from zerograph.planner.run import Run
from zerograph.planner.simulate import Memory, Task, on
from zerograph.planner.transfers import Transfer, transfers
from zerograph.planner.visits import Visit, gathers, visits


class Decisions(NamedTuple):
    """A plan without its buckets: what the search varies. By bucket: residency, homes, tiles and how far ahead it is
    gathered, where any differs from ``prefetch``; by layer of the profile: its level; by layer or activation: where
    what is saved of it waits. For all of it: how many reductions are under way, and how many layers before its own what
    is offloaded begins to come back."""

    residency: Sequence[Residency]
    homes: Sequence[Homes]
    tiles: tuple[int, ...]
    prefetch: int
    levels: tuple[int, ...]
    offload: tuple[tuple[str, Tier], ...]
    ahead: tuple[int, ...] = ()
    reductions: int = 1
    fetch_ahead: int = 1

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> Decisions:
        """Those of ``plan``, of which ``profile`` has the levels."""
        buckets, ahead = plan.buckets, plan.ahead()
        return cls(
            [b.residency for b in buckets],
            [b.homes for b in buckets],
            tuple(b.tiles for b in buckets),
            plan.prefetch,
            profile.levels(plan.recompute, plan.save),
            plan.offload,
            ahead if any(one != plan.prefetch for one in ahead) else (),
            plan.reductions,
            plan.fetch_ahead,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """One compute task of every schedule with the same tiles, prefetch and recomputation.

    Attributes:
        task: as it runs whole; gradients of tiled buckets are not in its memory.
        region: that it belongs to; ``first`` and ``last`` say whether it begins and ends that.
        visits: those that start before it.
        ready: buckets whose last gradient it makes.
        slices: how many slices it runs in, one after another; more than 1 where it works on tiles.
        reads, makes: tiled buckets that it reads, and whose gradient it makes.
        made: bytes of full gradients that it makes, by bucket.
        temporary: bytes that it holds of its own.
    """

    task: Task
    region: int
    first: bool
    last: bool
    visits: tuple[int, ...]
    ready: tuple[int, ...]
    slices: int = 1
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    made: tuple[tuple[int, int], ...] = ()
    temporary: int = 0


Moving = Mapping[int, Mapping[str, Sequence[Life]]]
"""By region, saved activations by the layer whose forward made them."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """Forward or backward, divided.

    Attributes:
        regions: in order.
        gathers: visit -> those whose gather begins at its start.
        frees: visit, or their number for the end -> those freed at its start.
        moving: forward: what the region is the last to read before the backward does; backward: what it is the first
            to need again. Plans may offload it in between.
    """

    name: Phase
    regions: tuple[int, ...]
    pieces: tuple[Piece, ...]
    visits: tuple[Visit, ...]
    gathers: Mapping[int, Sequence[int]]
    frees: Mapping[int, Sequence[int]]
    moving: Moving


class Scheduler:
    """Schedules plans of one step on one machine, whose buckets hold the same parameters."""

    def __init__(
        self,
        profile: Profile,
        buckets: Sequence[Sequence[Param]],
        names: Sequence[str],
        rates: Rates,
        moments: int = 2,
    ) -> None:
        self.profile, self.rates, self.moments = profile, rates, moments
        self.names, self.buckets = names, buckets
        self.bucket_of = {p.name: i for i, params in enumerate(buckets) for p in params}
        work = [region.work[0] for region in profile.regions]  # gradients are the same at all levels
        self._whole = {name: size for w in work for atom in w.atoms for name, size in atom.gradients}
        self._trained = [p for p in profile.params if p.trainable]
        self._updates: dict[frozenset[int], float] = {}
        self._transfers: dict[tuple[int, int], tuple[Transfer, ...]] = {}
        self._all: dict[tuple[int, ...], tuple[tuple[Transfer, ...], ...]] = {}
        self._parts: dict[tuple[int, int], list[_Part]] = {}
        self._phases: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[PhaseWork, ...]] = {}
        self._later: dict[tuple[object, ...], tuple[PhaseWork, ...]] = {}  # the same, with gathers that wait

    def tasks(self, plan: Plan) -> list[Task]:
        """One step under ``plan``: forward, backward and the optimizer's update."""
        return self.schedule(Decisions.of(plan, self.profile))

    def schedule(self, decisions: Decisions) -> list[Task]:
        """The same for the decisions of a plan."""
        return Run(self, decisions).tasks

    def phases(self, decisions: Decisions) -> tuple[PhaseWork, ...]:
        """Forward and backward, divided as ``decisions`` cut them."""
        key = (decisions.tiles, decisions.prefetch, decisions.levels)
        if key not in self._phases:
            self._phases[key] = tuple(_phases(self, *key))
        found, ahead = self._phases[key], decisions.ahead
        if not ahead:
            return found
        if (*key, ahead) not in self._later:  # only what begins when differs
            self._later[*key, ahead] = tuple(
                replace(phase, gathers=gathers(phase.visits, decisions.prefetch, ahead)) for phase in found
            )
        return self._later[*key, ahead]

    def transfers(self, bucket: int, tiles: int) -> tuple[Transfer, ...]:
        """The parts of a bucket; one if it is not tiled."""
        key = (bucket, tiles)
        if key not in self._transfers:
            self._transfers[key] = transfers(
                self.names[bucket], self.buckets[bucket], tiles, self._whole, self.rates, self.moments
            )
        return self._transfers[key]

    def all_transfers(self, tiles: tuple[int, ...]) -> tuple[tuple[Transfer, ...], ...]:
        """The parts of every bucket."""
        if tiles not in self._all:
            self._all[tiles] = tuple(self.transfers(bucket, count) for bucket, count in enumerate(tiles))
        return self._all[tiles]

    def moved(self, homes: Sequence[Homes]) -> Memory:
        """What ``homes`` change of the memory that is held between steps, by tier."""
        found: dict[Tier, int] = {}
        for bucket, home in enumerate(homes):
            for tier, size in self.transfers(bucket, 1)[0].shards.moved(home):
                found[tier] = found.get(tier, 0) + size
        return tuple(found.items())

    def update_seconds(self, host: Sequence[int]) -> float:
        """Of the update on the device, when the states of the buckets ``host`` live off it."""
        key = frozenset(host)
        if key not in self._updates:
            gone = {p.name for bucket in key for p in self.buckets[bucket] if p.sharded}  # the others stay
            self._updates[key] = self.rates.update((p for p in self._trained if p.name not in gone), self.moments)
        return self._updates[key]

    def alive(self, task: str, levels: tuple[int, ...]) -> list[Life]:
        """What is held through the compute tasks named ``task``, besides buckets, gradients and temporaries."""
        at = levels_of(self.profile, levels)
        regions = [k for k, region in enumerate(self.profile.regions) if name_of(region) == task]
        found = []
        for life in self.profile.lives:
            end = end_of(life, at)
            if any(life.start <= k and (end is None or k <= end) for k in regions):
                found.append(life)
        return found

    def parts(self, region: int, level: int) -> list[_Part]:
        """The work of a region, divided where buckets are first read."""
        key = (region, level)
        if key not in self._parts:
            self._parts[key] = _parts(self.profile.regions[region].work[level].atoms, self.bucket_of)
        return self._parts[key]


def _phases(
    scheduler: Scheduler, tiles: tuple[int, ...], prefetch: int, levels: tuple[int, ...]
) -> Iterator[PhaseWork]:
    """Divide the regions of each phase into pieces and visits."""
    profile, at = scheduler.profile, levels_of(scheduler.profile, levels)
    takes, gives = _memory(profile, at)
    leaving, coming = _moving(profile, at)
    phases: tuple[Phase, ...] = ("forward", "backward") if profile.training else ("forward",)
    for name in phases:
        regions = [k for k, region in enumerate(profile.regions) if region.phase == name]
        moving = leaving if name == "forward" else coming
        yield _phase(scheduler, name, regions, at, tiles, prefetch, takes, gives, moving)


def levels_of(profile: Profile, levels: Sequence[int]) -> list[int]:
    """The level of each region: its layer's, and outside of layers the last."""
    of_layer = dict(zip(profile.layers, levels, strict=True))
    return [of_layer.get(region.layer, profile.all_saved) for region in profile.regions]


def name_of(region: Region) -> str:
    """The name of the compute tasks of ``region``."""
    return f"{region.phase} {region.layer or 'outside of layers'}"


def _memory(profile: Profile, levels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes that begin to live with each region, and those that end with it."""
    count = len(profile.regions)
    takes, gives = [0] * count, [0] * count
    for life in profile.lives:
        takes[life.start] += life.bytes
        end = end_of(life, levels)
        if end is not None:
            gives[end] += life.bytes
    return takes, gives


def end_of(life: Life, levels: Sequence[int]) -> int | None:
    """The region that a life ends with; None where the user gets it.

    The layer that makes it says how long it is saved, and so does the one that reads it last: a layer that computes
    itself again begins with what entered it.
    """
    if life.read is None:
        return None
    own, end = levels[life.start], life.read
    for level, region in life.saved.items():
        if region > end and (level == own or levels[region] == level):
            end = region
    return end


def need_of(life: Life, levels: Sequence[int]) -> int | None:
    """The region of the backward that first reads what a life holds; None where none does."""
    own = levels[life.start]
    found = [life.needed[k] for k, region in life.saved.items() if k == own or levels[region] == k]
    return min(found, default=None)


def _moving(profile: Profile, levels: Sequence[int]) -> tuple[Moving, Moving]:
    """What regions of the forward read last, and what those of the backward need first, of what layers save."""
    leaving: dict[int, dict[str, list[Life]]] = {}
    coming: dict[int, dict[str, list[Life]]] = {}
    for life in profile.lives:
        region = profile.regions[life.start]
        need = need_of(life, levels) if region.layer and region.phase == "forward" else None
        if need is not None and life.read is not None:
            for found, k in ((leaving, life.read), (coming, need)):
                found.setdefault(k, {}).setdefault(region.layer, []).append(life)
    return leaving, coming


def _phase(
    scheduler: Scheduler,
    name: Phase,
    regions: Sequence[int],
    levels: Sequence[int],
    tiles: tuple[int, ...],
    prefetch: int,
    takes: Sequence[int],
    gives: Sequence[int],
    moving: Moving,
) -> PhaseWork:
    parts: list[tuple[int, _Part]] = []
    begins: list[int] = []
    for k in regions:
        found = scheduler.parts(k, levels[k])
        begins += [len(parts)] * len(found)
        parts += [(k, part) for part in found]
    found_visits = visits([part.buckets for _, part in parts], begins, prefetch)
    tiled = frozenset(bucket for bucket, count in enumerate(tiles) if count > 1)
    alone = [i for i, (_, part) in enumerate(parts) if tiled and not tiled.isdisjoint((*part.buckets, *part.gradients))]
    cuts = sorted({*begins, *(v.start for v in found_visits), *alone, *(i + 1 for i in alone if i + 1 < len(parts))})
    starts: dict[int, list[int]] = {}
    for number, visit in enumerate(found_visits):
        starts.setdefault(visit.start, []).append(number)
    ready: dict[int, list[int]] = {}
    for bucket, at in {bucket: i for i, (_, part) in enumerate(parts) for bucket in part.gradients}.items():
        if bucket not in tiled:
            ready.setdefault(at, []).append(bucket)
    pieces = []
    for begin, end in pairwise((*cuts, len(parts))):
        k, inside = parts[begin][0], [part for _, part in parts[begin:end]]
        region = scheduler.profile.regions[k]
        temporary = region.work[levels[k]].temporary
        first, last = begins[begin] == begin, end == len(parts) or parts[end][0] != k
        made = [(bucket, size) for part in inside for bucket, size in part.gradients.items()]
        taken = temporary + (takes[k] if first else 0) + sum(size for bucket, size in made if bucket not in tiled)
        given = temporary + (gives[k] if last else 0)
        seconds = scheduler.rates.compute(sum(p.flops for p in inside), sum(p.moved for p in inside))
        task = Task(
            name_of(region),
            "compute",
            seconds,
            (),
            on("device", taken),
            on("device", given),
            region.module,
            region.source,
        )
        done = tuple(bucket for at in range(begin, end) for bucket in ready.get(at, ()))
        reads = tuple(bucket for part in inside for bucket in part.buckets if bucket in tiled)
        makes = tuple(bucket for bucket, _ in made if bucket in tiled)
        slices = max((tiles[bucket] for bucket in (*reads, *makes)), default=1)
        visited = tuple(starts.get(begin, ()))
        pieces.append(Piece(task, k, first, last, visited, done, slices, reads, makes, tuple(made), temporary))
    gathered = gathers(found_visits, prefetch, ())
    return PhaseWork(name, tuple(regions), tuple(pieces), found_visits, gathered, _frees(found_visits), moving)


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive atoms that read the same buckets; ``gradients`` are bytes by bucket."""

    buckets: tuple[int, ...]
    flops: int
    moved: int
    gradients: dict[int, int]


def _parts(atoms: Sequence[Atom], bucket_of: dict[str, int]) -> list[_Part]:
    parts: list[_Part] = []
    for atom in atoms:
        buckets = tuple(dict.fromkeys(bucket_of[name] for name in atom.params))
        gradients: dict[int, int] = {}
        for name, size in atom.gradients:
            gradients[bucket_of[name]] = gradients.get(bucket_of[name], 0) + size
        if parts and set(buckets) <= set(parts[-1].buckets):
            old = parts.pop()
            for bucket, size in old.gradients.items():
                gradients[bucket] = gradients.get(bucket, 0) + size
            parts.append(_Part(old.buckets, old.flops + atom.flops, old.moved + atom.moved, gradients))
        else:
            parts.append(_Part(buckets, atom.flops, atom.moved, gradients))
    return parts


def _frees(found: Sequence[Visit]) -> dict[int, list[int]]:
    """Which visits' buckets are freed at the start of each visit."""
    frees: dict[int, list[int]] = {}
    for i, visit in enumerate(found):
        frees.setdefault(visit.freed, []).append(i)
    return frees
