"""Divides a step into pieces of work and intervals of buckets, before anything is partitioned or lowered.

It follows what the passes and the lowering will do, at the grain of one piece per layer and interval of a bucket.
Coarser than programs that run: what is saved follows :mod:`~zerograph.planner.profile.liveness`, memory of a layer that
a plan cuts in several is taken with its first part, and several short layers are not merged into one segment.

The work that plans of the same buckets, tiles, prefetch and recomputation share is done here, once, because the search
changes residencies and placements hundreds of times; from it :mod:`~zerograph.planner.programs.coarse` makes the
programs of a plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, TypeVar

from zerograph.core.instructions import Compute, Update
from zerograph.core.machine import Tier
from zerograph.core.param_bytes import sizes_of_states
from zerograph.core.placement import second_copies
from zerograph.core.plan import Bucket, Placement, Plan
from zerograph.core.prefetching import UnshardedInterval, gathers_by_start, unsharded_intervals
from zerograph.core.program import Register, Segment
from zerograph.core.segment_profile import SegmentProfile
from zerograph.core.step import Kind, Param, Phase
from zerograph.planner.profile.regions import Atom, Life, Profile
from zerograph.planner.programs.placement import BucketPart, bucket_parts, device_update, ring_bytes, streamed
from zerograph.sim.costs import Costs, TierBytes
from zerograph.sim.rates import Rates

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One piece of work of every coarse program with the same tiles, prefetch and recomputation.

    Attributes:
        compute: as it runs whole, where nothing is offloaded.
        region: that it belongs to; ``first`` and ``last`` say whether it begins and ends that.
        intervals: those that start before it.
        ready: buckets whose last gradient it makes.
        slices: how many slices it runs in, one after another; more than 1 where it works on tiles.
        reads, makes: tiled buckets that it reads, and whose gradient it makes.
        made: registers of the full gradients that it makes of buckets that are not tiled.
        work: what it computes; without what it holds of its own where it runs in slices.
        temporary: bytes that it holds of its own.
    """

    compute: Compute
    region: int
    first: bool
    last: bool
    intervals: tuple[int, ...]
    ready: tuple[int, ...]
    slices: int = 1
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    work: int = 0
    temporary: int = 0


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """Forward or backward, divided.

    Attributes:
        regions: in order.
        gathers: interval -> those whose gather begins at its start.
        frees: interval, or their number for the end -> those freed at its start.
        gradients: bucket -> registers of the full gradients that its reduction reads.
    """

    name: Phase
    regions: tuple[int, ...]
    pieces: tuple[Piece, ...]
    intervals: tuple[UnshardedInterval, ...]
    gathers: Mapping[int, Sequence[int]]
    frees: Mapping[int, Sequence[int]]
    gradients: Mapping[int, tuple[int, ...]]


class Registers:
    """The registers of all coarse programs of a scheduler, behind those that are there; what has the same key is one.

    Attributes:
        contents: what each holds.
        bucket: of those that hold a gathered bucket or tile, or a gradient of one.
    """

    def __init__(self, contents: Iterable[Register] = ()) -> None:
        self.contents = list(contents)
        self.bucket: dict[int, int] = {}
        self._of: dict[object, int] = {}

    def get(
        self, key: object, name: str, size: int, kind: Kind, tier: Tier = "device", *, bucket: int = -1,
        storage: int | None = None,
    ) -> int:  # fmt: skip
        """The register of ``key``, which holds that."""
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = len(self.contents)
            self.contents.append(Register(name, size, found if storage is None else storage, kind, tier))
            if bucket >= 0:
                self.bucket[found] = bucket
        return found


class Scheduler:
    """Divides one step as plans whose buckets hold the same parameters do, for coarse programs of them on one machine.

    Attributes:
        registers, segments: of all coarse programs.
        costs: of their instructions.
        made: instructions, parts of buckets and segments by what tells them apart, as coarse programs share them.
    """

    def __init__(
        self,
        profile: Profile,
        buckets: Sequence[Sequence[Param]],
        names: Sequence[str],
        rates: Rates,
        moments: int = 2,
        beside: Iterable[Scheduler] = (),
    ) -> None:
        """
        Args:
            beside: schedulers of variants of the step; with one of the same buckets this one shares what it makes.
        """
        self.profile, self.rates, self.moments = profile, rates, moments
        self.names, self.buckets = names, buckets
        self.bucket_of = {p.name: i for i, params in enumerate(buckets) for p in params}
        work = [region.work[0] for region in profile.regions]  # gradients are the same at all options
        self._full_gradients = {name: size for w in work for atom in w.atoms for name, size in atom.gradients}
        alike = next((other for other in beside if self._of_buckets() == other._of_buckets()), None)
        self.registers: Registers = Registers() if alike is None else alike.registers
        self.segments: list[Segment] = [] if alike is None else alike.segments
        self.costs: Costs = Costs(rates) if alike is None else alike.costs
        self.made: dict[tuple[object, ...], Any] = {} if alike is None else alike.made
        self._all: dict[tuple[int, ...], tuple[tuple[BucketPart, ...], ...]] = {}
        self._parts: dict[tuple[int, int], list[_RegionPart]] = {}
        self._options: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[int, ...]] = {}
        self._phases: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[PhaseWork, ...]] = {}
        self._later: dict[tuple[object, ...], tuple[PhaseWork, ...]] = {}  # the same, with gathers that wait
        self._saved: dict[tuple[object, ...], SavedRegisters] = {}
        self._held: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        self._moved: dict[tuple[int, Placement], TierBytes] = {}
        self._streamed = [streamed(params) for params in buckets]

    def _of_buckets(self) -> tuple[object, ...]:
        """All that instructions of buckets are made from."""
        return (self.rates, self.moments, self.names, self.buckets, self._full_gradients)

    def fresh(self) -> Scheduler:
        """The same without the registers and segments of coarse programs so far."""
        return Scheduler(self.profile, self.buckets, self.names, self.rates, self.moments)

    def once(self, make: Callable[..., T], *key: object) -> T:
        """The result of ``make`` for ``key``, which tells it apart from all else that it makes."""
        found: T | None = self.made.get((make, *key))
        if found is None:
            found = self.made[make, *key] = make(self, *key)
        return found

    def options(self, plan: Plan) -> tuple[int, ...]:
        """The option of every layer of the profile under ``plan``."""
        key = (plan.recompute, plan.save)
        if key not in self._options:
            self._options[key] = self.profile.options(*key)
        return self._options[key]

    def phases(self, plan: Plan) -> tuple[PhaseWork, ...]:
        """Forward and backward, divided as ``plan`` cuts them."""
        # Everything that a division depends on: placements and residencies change what is moved, not where work is cut.
        key = (tuple(bucket.tiles for bucket in plan.buckets), plan.prefetch, self.options(plan))
        if key not in self._phases:
            self._phases[key] = tuple(_phases(self, *key))
        found, ahead = self._phases[key], plan.ahead()
        if all(one == plan.prefetch for one in ahead):
            return found
        if (*key, ahead) not in self._later:  # only what begins when differs
            self._later[*key, ahead] = tuple(
                replace(phase, gathers=gathers_by_start(phase.intervals, plan.prefetch, ahead)) for phase in found
            )
        return self._later[*key, ahead]

    def bucket_parts(self, bucket: int, tiles: int) -> tuple[BucketPart, ...]:
        """The parts of a bucket; one if it is not tiled."""
        return self.once(Scheduler._cut, bucket, tiles)

    def _cut(self, bucket: int, tiles: int) -> tuple[BucketPart, ...]:
        name, params = self.names[bucket], self.buckets[bucket]
        return bucket_parts(bucket, name, params, tiles, self._full_gradients, self.rates, self.moments)

    def all_bucket_parts(self, tiles: tuple[int, ...]) -> tuple[tuple[BucketPart, ...], ...]:
        """The parts of every bucket."""
        if tiles not in self._all:
            self._all[tiles] = tuple(self.bucket_parts(bucket, count) for bucket, count in enumerate(tiles))
        return self._all[tiles]

    def moved(self, plan: Plan) -> TierBytes:
        """The change of memory held between steps by placements of buckets off the device, by tier."""
        placements, staging = (bucket.placement for bucket in plan.buckets), self.rates.staging
        ring = ring_bytes(zip(placements, self._streamed, strict=True), staging)
        return *self.moved_of(plan, plan.buckets).items(), (staging, ring)

    def moved_of(self, plan: Plan, buckets: Iterable[Bucket]) -> dict[Tier, int]:
        """The same by placements of some ``buckets`` alone, without staging buffers."""
        found: dict[Tier, int] = {}
        for bucket in buckets:
            key = (bucket.index, bucket.placement)
            if key not in self._moved:
                self._moved[key] = self.bucket_parts(bucket.index, 1)[0].shards.moved(bucket.placement)
            for tier, size in self._moved[key]:
                found[tier] = found.get(tier, 0) + size
            if second_copies(plan, bucket):
                copies = self.bucket_parts(bucket.index, 1)[0].shards.at(bucket.placement).copies
                found["host"] = found.get("host", 0) + copies
        return found

    def update(self, host: Sequence[int]) -> Update:
        """The update on the device, when the states of the buckets ``host`` live off it."""
        key = ("update", frozenset(host))
        found: Update | None = self.made.get(key)
        if found is None:
            state_sizes = sizes_of_states(chain.from_iterable(self.buckets), self.moments)
            found = self.made[key] = device_update(self.buckets, host, state_sizes)
        return found

    def update_inside(self, bucket: int, gradient: int) -> Update:
        """The update on the device of the shards of a bucket, whose ``gradient`` goes with it."""
        shards = [param for param in self.buckets[bucket] if param.sharded]
        update = device_update([shards], (), sizes_of_states(shards, self.moments))
        return Update((bucket,), update.sizes, reads=(gradient,), dead=(gradient,))

    def segment(self, flops: int, moved: int, packed: int, temporary: int, slices: int = 1) -> int:
        """The segment of that much work."""
        key = ("segment", flops, moved, packed, temporary, slices)
        found: int | None = self.made.get(key)
        if found is None:
            found = self.made[key] = len(self.segments)
            self.segments.append(Segment("", 0, flops, moved, SegmentProfile((temporary,)), slices, packed))
        return found

    def held(self, region: int, option: int, saved: SavedRegisters) -> Sequence[int]:
        """By interval of a region's memory, the most bytes that it holds beyond those that were there before, and
        beyond what it makes for other regions but for gradients."""
        begins, ends = saved.begins.get(region, ()), saved.ends.get(region, ())
        key = (region, option, begins, ends)
        if key not in self._held:
            lives = (life.members for register in ends for life in saved.lives[register] if life.start != region)
            memory = self.profile.regions[region].work[option].memory
            made = sum(life.made for register in begins for life in saved.lives[register])
            self._held[key] = [size - made for size in memory.held(chain.from_iterable(lives))]
        return self._held[key]

    def compute(
        self,
        work: int,
        outs: tuple[int, ...],
        dead: tuple[int, ...],
        module: str,
        source: str,
        args: tuple[int, ...] = (),
        token_tiles: int = 1,
    ) -> Compute:
        """The instruction that does that."""
        key = (work, outs, dead, module, source, args, token_tiles)
        found: Compute | None = self.made.get(key)
        if found is None:
            found = self.made[key] = Compute(work, args, outs, dead, module, source, token_tiles)
        return found

    def saved(self, options: tuple[int, ...], offload: tuple[tuple[str, Tier], ...]) -> SavedRegisters:
        """The registers of what lives from region to region."""
        if (options, offload) not in self._saved:
            at = options_of(self.profile, options)
            self._saved[options, offload] = SavedRegisters(self.profile, at, dict(offload), self.registers)
        return self._saved[options, offload]

    def parts(self, region: int, option: int) -> list[_RegionPart]:
        """The work of a region, divided where buckets are first read."""
        key = (region, option)
        if key not in self._parts:
            self._parts[key] = _parts(self.profile.regions[region].work[option].atoms, self.bucket_of)
        return self._parts[key]


def _phases(
    scheduler: Scheduler, tiles: tuple[int, ...], prefetch: int, options: tuple[int, ...]
) -> Iterator[PhaseWork]:
    """Divide the regions of each phase into pieces and intervals."""
    profile, at = scheduler.profile, options_of(scheduler.profile, options)
    saved = scheduler.saved(options, ())
    forward, backward = (
        [k for k, region in enumerate(profile.regions) if region.phase == name] for name in ("forward", "backward")
    )
    # A loss in tiles makes gradients in the forward, which the backward scales and reduces.
    first = _phase(scheduler, "forward", forward, at, tiles, prefetch, saved, reduces=False)
    yield first
    if profile.training:
        yield _phase(scheduler, "backward", backward, at, tiles, prefetch, saved, first.gradients)


def options_of(profile: Profile, options: Sequence[int]) -> list[int]:
    """The option of each region: its layer's, and outside of layers the last."""
    of_layer = dict(zip(profile.layers, options, strict=True))
    return [of_layer.get(region.layer, profile.all_saved) for region in profile.regions]


class SavedRegisters:
    """The registers of values that live from one region to another; those that begin, move and end alike share one.

    Attributes:
        begins, ends: region -> registers.
        leaves: what is offloaded, by the region of the forward that reads it last, by the plan's name for it, and by
            the region of the backward that needs it first.
        comes: the same by the region of the backward that needs it first, and by the plan's name for it.
        lives: by register, what it stands for.
    """

    def __init__(self, profile: Profile, options: Sequence[int], tier_of: Mapping[str, Tier], registers: Registers):
        groups: dict[tuple[int, int | None, str, int, int], int] = {}
        members: dict[tuple[int, int | None, str, int, int], list[Life]] = {}
        for life in profile.lives:
            end, what, need = end_of(life, options), None, None
            if end == life.start:
                continue  # the region's memory tells of it
            region = profile.regions[life.start]
            # Only what layers save may leave; what the model returns (`read` is None) the user gets on the device.
            if tier_of and region.layer and region.phase == "forward" and life.read is not None:
                what = next((name for name in (life.activation, region.layer) if name in tier_of), None)
                need = need_of(life, options) if what is not None else None
            if what is None or need is None or life.read is None:
                key = (life.start, end, "", -1, -1)
            else:
                key = (life.start, end, what, life.read, need)
            groups[key] = groups.get(key, 0) + life.bytes
            members.setdefault(key, []).append(life)
        self.begins: dict[int, tuple[int, ...]] = {}
        self.ends: dict[int, tuple[int, ...]] = {}
        self.leaves: dict[int, dict[str, dict[int, list[int]]]] = {}
        self.comes: dict[int, dict[str, list[int]]] = {}
        self.lives: dict[int, list[Life]] = {}
        for key, size in groups.items():
            start, end, what, read, need = key
            name = max(members[key], key=lambda life: life.bytes).name
            # With the size: at another option the same regions save something else.
            register = registers.get(("saved", *key, size), name, size, "activation")
            self.lives[register] = members[key]
            self.begins[start] = (*self.begins.get(start, ()), register)
            if end is not None:
                self.ends[end] = (*self.ends.get(end, ()), register)
            if what:
                self.leaves.setdefault(read, {}).setdefault(what, {}).setdefault(need, []).append(register)
                self.comes.setdefault(need, {}).setdefault(what, []).append(register)


def end_of(life: Life, options: Sequence[int]) -> int | None:
    """The region that a life ends with; None where the user gets it.

    The layer that makes it says how long it is saved, and so does the one that reads it last: a layer that computes
    itself again begins with what entered it.
    """
    if life.read is None:
        return None
    own, end = options[life.start], life.read
    for option, region in life.saved.items():
        if region > end and (option == own or options[region] == option):
            end = region
    return end


def need_of(life: Life, options: Sequence[int]) -> int | None:
    """The region of the backward that first reads what a life holds; None where none does."""
    own = options[life.start]
    found = [life.needed[k] for k, region in life.saved.items() if k == own or options[region] == k]
    return min(found, default=None)


def _phase(
    scheduler: Scheduler,
    name: Phase,
    regions: Sequence[int],
    options: Sequence[int],
    tiles: tuple[int, ...],
    prefetch: int,
    saved: SavedRegisters,
    made_before: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    *,
    reduces: bool = True,
) -> PhaseWork:
    """One phase in pieces and intervals. One that ``reduces`` gradients does so with those that were ``made_before``,
    too."""
    parts: list[tuple[int, _RegionPart]] = []
    begins: list[int] = []
    for k in regions:
        found = scheduler.parts(k, options[k])
        begins += [len(parts)] * len(found)
        parts += [(k, part) for part in found]
    found_intervals = unsharded_intervals([part.buckets for _, part in parts], begins, prefetch)
    tiled = frozenset(bucket for bucket, count in enumerate(tiles) if count > 1)
    # Work on tiles runs in slices, so that it is cut off from what stands before it and behind it.
    alone = [i for i, (_, part) in enumerate(parts) if tiled and not tiled.isdisjoint((*part.buckets, *part.gradients))]
    cuts = sorted({*begins, *(v.start for v in found_intervals), *alone, *(i + 1 for i in alone if i + 1 < len(parts))})
    starts: dict[int, list[int]] = {}
    for number, interval in enumerate(found_intervals):
        starts.setdefault(interval.start, []).append(number)
    ready: dict[int, list[int]] = {}
    # Of several parts that make gradients of a bucket, the dict keeps the last: then the bucket can be reduced.
    last_made = dict.fromkeys(made_before, 0) | {b: i for i, (_, part) in enumerate(parts) for b in part.gradients}
    for bucket, at in last_made.items() if reduces else ():
        if bucket not in tiled:
            ready.setdefault(at, []).append(bucket)
    pieces, gradients, full = [], dict(made_before), 0
    for begin, end in pairwise((*cuts, len(parts))):
        k, inside = parts[begin][0], [part for _, part in parts[begin:end]]
        region = scheduler.profile.regions[k]
        first, last = begins[begin] == begin, end == len(parts) or parts[end][0] != k
        full = 0 if first else full  # bytes of the full gradients that the region has made
        sizes: dict[int, int] = {}
        for part in inside:
            for bucket, size in part.gradients.items():
                sizes[bucket] = sizes.get(bucket, 0) + size
        made = []
        for bucket, size in sizes.items():
            if bucket not in tiled:
                key = ("full", bucket, len(gradients.get(bucket, ())), size)
                text = f"full gradient of {scheduler.names[bucket]}"
                made.append(scheduler.registers.get(key, text, size, "gradient", bucket=bucket))
                gradients[bucket] = (*gradients.get(bucket, ()), made[-1])
        full += sum(sizes.values())
        intervals = region.work[options[k]].memory.begins
        held = scheduler.held(k, options[k], saved)[
            bisect_left(intervals, 0 if first else parts[begin - 1][1].end) : bisect_left(intervals, inside[-1].end)
        ]
        temporary = max(held) - full
        reads = tuple(bucket for part in inside for bucket in part.buckets if bucket in tiled)
        makes = tuple(bucket for bucket in sizes if bucket in tiled)
        slices = max((tiles[bucket] for bucket in (*reads, *makes)), default=1)
        flops, moved, packed = (sum(getattr(p, part) for p in inside) for part in ("flops", "moved", "packed"))
        outs = (*(saved.begins.get(k, ()) if first else ()), *made)
        dead = saved.ends.get(k, ()) if last else ()
        # What it makes can take the place of what dies with it alone. In slices what it holds lives from the first to
        # the last: the coarse program has a register for it.
        ending = sum(scheduler.registers.contents[register].bytes for register in dead) if slices == 1 else 0
        temporary = max(temporary, -ending)
        work = scheduler.segment(flops, moved, packed, temporary if slices == 1 else 0, slices)
        compute = scheduler.compute(work, outs, dead, region.module, region.source, (), region.token_tiles)
        done = tuple(bucket for at in range(begin, end) for bucket in ready.get(at, ()))
        visited = tuple(starts.get(begin, ()))
        pieces.append(Piece(compute, k, first, last, visited, done, slices, reads, makes, tuple(made), work, temporary))
    gathered = gathers_by_start(found_intervals, prefetch, ())
    frees = _frees(found_intervals)
    return PhaseWork(name, tuple(regions), tuple(pieces), found_intervals, gathered, frees, gradients)


@dataclass(frozen=True, slots=True)
class _RegionPart:
    """Consecutive atoms that read the same buckets; ``gradients`` are bytes by bucket, ``end`` is the last atom's."""

    buckets: tuple[int, ...]
    flops: int
    moved: int
    packed: int
    gradients: dict[int, int]
    end: int


def _parts(atoms: Sequence[Atom], bucket_of: dict[str, int]) -> list[_RegionPart]:
    parts: list[_RegionPart] = []
    for atom in atoms:
        buckets = tuple(dict.fromkeys(bucket_of[name] for name in atom.params))
        gradients: dict[int, int] = {}
        for name, size in atom.gradients:
            gradients[bucket_of[name]] = gradients.get(bucket_of[name], 0) + size
        # It reads nothing that the part before has not made whole, so no interval can begin here.
        if parts and set(buckets) <= set(parts[-1].buckets):
            old = parts.pop()
            for bucket, size in old.gradients.items():
                gradients[bucket] = gradients.get(bucket, 0) + size
            work = old.flops + atom.flops, old.moved + atom.moved, old.packed + atom.packed
            parts.append(_RegionPart(old.buckets, *work, gradients, atom.end))
        else:
            parts.append(_RegionPart(buckets, atom.flops, atom.moved, atom.packed, gradients, atom.end))
    return parts


def _frees(found: Sequence[UnshardedInterval]) -> dict[int, list[int]]:
    """Which intervals' buckets are freed at the start of each interval."""
    frees: dict[int, list[int]] = {}
    for i, interval in enumerate(found):
        frees.setdefault(interval.freed, []).append(i)
    return frees
