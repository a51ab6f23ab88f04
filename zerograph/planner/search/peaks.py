"""Lower the peak of a plan on the device, and change the plan nowhere else: gathers begin later, operators get tiles.

The coarse programs of a plan are simulated, and every time in which a bucket is unsharded is noted. Where the device
holds more than a target, gathers whose bucket nobody reads yet begin later; if that is not enough, what is read is cut
into as few tiles as make room. That is repeated until the target is met, or nothing is left to change. Targets lie
between a plan's own peak and the least that these two ways reach, so no budget enters, and more of it cannot make the
answer worse.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerograph.core.instructions import Compute, Free, Gather, Move, Reduce, WaitGather
from zerograph.core.plan import Plan
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.search.decisions import with_starts, with_tiles
from zerograph.planner.search.search_space import Candidate, SearchSpace
from zerograph.sim.simulate import walk
from zerograph.sim.tasks import LATE

LEVELS = 4
"""Targets between a plan's peak and the least that its peak can be lowered to."""
ROUNDS = 8
"""Changes of one plan towards one target, at most."""


class _Held(NamedTuple):
    """A bucket from the start of one task to the start, or the end, of another."""

    bucket: int
    first: int
    last: int
    early: bool  # whether nobody reads it yet; else it is in use, or its gradients are


class _Watch:
    """The coarse programs of a plan, watched: when each bucket is unsharded, and from when on it is needed.

    Attributes:
        run: what the coarse programs did.
        used: gather -> the last task that waits for its bucket.
        held: buckets, while they could be less.
    """

    def __init__(self, space: SearchSpace, plan: Plan, tilable: frozenset[int]) -> None:
        self.tilable = tilable
        self.used: dict[int, int] = {}
        self.held: list[_Held] = []
        programs = coarse_programs(space.scheduler, plan)
        self.run = walk(programs, space.scheduler.shared.costs)
        bucket_of = space.scheduler.registers.bucket
        brought: dict[int, tuple[int, int]] = {}  # gather -> its bucket, and the first task that belongs to it
        gathers: dict[tuple[int, int], int] = {}  # bucket and tile -> the task that gathered it last
        begun: dict[tuple[int, int], int] = {}  # bucket and tile -> the task that began to fetch it
        gradients: dict[int, int] = {}  # bucket -> the task that makes its first gradient
        waits: list[int] = []  # gathers that the next compute waits for
        task, last = -1, -1
        for instruction in (instruction for program in programs for instruction in program.instructions):
            task += instruction.stream is not None
            match instruction:
                case Compute():
                    last = task
                    self.used.update(dict.fromkeys(waits, task))
                    waits.clear()
                    for bucket in dict.fromkeys(bucket_of[register] for register in instruction.reads):
                        self.held.append(_Held(bucket, task, task, early=False))
                    for register in instruction.writes:
                        if register in bucket_of:
                            gradients.setdefault(bucket_of[register], task)
                case Move(what="shard"):
                    begun.setdefault((instruction.bucket, instruction.tile), task)
                case Gather():
                    part = instruction.bucket, instruction.tile
                    brought[task] = instruction.bucket, begun.pop(part, task)
                    gathers[part] = task
                case WaitGather():
                    waits.append(gathers[instruction.bucket, instruction.tile])
                case Free(bucket=bucket, tiles=1):
                    # What is kept cannot be tiled.
                    if bucket in tilable and plan.buckets[bucket].residency == "use":
                        self.held.append(_Held(bucket, self.used[gathers[bucket, 0]], last, early=False))
                case Reduce(bucket=bucket, tile=tile, tiles=tiles):
                    if bucket in tilable and tile == tiles - 1:
                        self.held.append(_Held(bucket, gradients[bucket], task, early=False))
        # Then a bucket takes memory when it is needed, but for what it fetches.
        late = space.scheduler.shared.costs.uses_buffers_again
        for gather, (bucket, first) in brought.items():
            if gather in self.used and (first < gather or not late):
                self.held.append(_Held(bucket, first, self.used[gather], early=True))


@dataclass(slots=True)
class _Short:
    """The relief asked of a bucket: its gathers not before ``gather``, and ``size`` bytes less while it is used."""

    gather: int | None = None
    size: int = 0


def with_lower_peaks(plans: Iterable[Candidate], *, tile: bool, work: int) -> Iterator[Candidate]:
    """Plans that need less of the device than ``plans``, with the same decisions otherwise.

    Args:
        tile: whether operators may be tiled; then what ``plans`` tile is decided anew, too.
        work: tasks that are simulated, at most, but for the plan that is being changed then.
    """
    for plan in plans:
        if work <= 0:
            return
        space, before = plan.space, plan.space.work
        tilable = frozenset(b for b, most in enumerate(space.most_tiles) if most > 1) if tile else frozenset()
        for target, start in _targets(plan, tilable):
            for changed in _reach(start, target, tilable):
                yield changed
                if space.work - before >= work:
                    return
        work -= space.work - before


def least(found: Candidate, *, tile: bool) -> Candidate:
    """``found`` with every gather as late and, if ``tile``, every operator in as many tiles as there may be."""
    space = found.space
    plan, overlaps = found.plan, space.scheduler.rates.overlaps
    tiles = space.finest if tile else [bucket.tiles for bucket in plan.buckets]
    return space.of(_with(plan, tiles, [0] * len(tiles) if overlaps else plan.ahead()))


def _with(plan: Plan, tiles: Sequence[int], ahead: Sequence[int]) -> Plan:
    """``plan`` with other tiles and starts of its buckets."""
    return with_starts(with_tiles(plan, dict(enumerate(tiles))), dict(enumerate(ahead)))


def _targets(plan: Candidate, tilable: frozenset[int]) -> Iterator[tuple[int, Candidate]]:
    """Bytes to reach, with the plan to begin from."""
    if tilable and any(bucket.tiles > 1 for bucket in plan.plan.buckets):
        untiled = plan.space.of(_with(plan.plan, [1] * len(plan.plan.buckets), plan.plan.ahead()))
        yield plan.peak, untiled
        # Other targets are reached from whole operators, so that tiling happens where the peak is and nowhere else.
        plan = untiled
    smallest = least(plan, tile=bool(tilable))
    room = plan.peak - smallest.peak
    yield smallest.peak, smallest  # all of it, everywhere
    if room > 0:
        yield from ((plan.peak - room * k // LEVELS, plan) for k in range(1, LEVELS + 1))


def _reach(plan: Candidate, target: int, tilable: frozenset[int]) -> Iterator[Candidate]:
    """Change ``plan`` step by step until its peak is at most ``target``."""
    space = plan.space
    if plan.peak <= target:
        yield plan
    for _ in range(ROUNDS):
        if plan.peak <= target:
            return
        watch = _Watch(space, plan.plan, tilable)
        space.work += len(watch.run.starts)
        wanted = _wanted(space, plan, watch, target)
        tiles, ahead = [bucket.tiles for bucket in plan.plan.buckets], list(plan.plan.ahead())
        for bucket, short in wanted.items():
            if short.gather is not None:
                # At least one interval later than now: else the next round would want the same again.
                ahead[bucket] = min(short.gather, ahead[bucket] - 1)
            if short.size:
                tiles[bucket] = _fewest(space, bucket, tiles[bucket], ahead[bucket], short.size)
        changed = space.of(_with(plan.plan, tiles, ahead))
        # The space hands out one candidate per plan: nothing was left to change.
        if changed is plan:
            return
        plan = changed
        yield plan


def _fewest(space: SearchSpace, bucket: int, tiles: int, ahead: int, size: int) -> int:
    """The fewest tiles that hold ``size`` bytes less than ``tiles`` do; all there may be where none do."""
    (part,) = space.scheduler.bucket_parts(bucket, 1)

    def held(count: int) -> int:
        unsharded = part.unsharded * min(count, ahead + 1) // count
        return unsharded + part.gradients * min(count, 2) // count  # one is being made, one reduced

    most = space.most_tiles[bucket]
    return next((count for count in range(tiles + 1, most) if held(tiles) - held(count) >= size), most)


def _wanted(space: SearchSpace, plan: Candidate, watch: _Watch, target: int) -> dict[int, _Short]:
    """By bucket, what would bring the device down to ``target`` where it holds more."""
    starts, ends = watch.run.starts, watch.run.ends
    reads = sorted({starts[task] for task in watch.used.values()})  # when intervals begin
    buckets, ahead = plan.plan.buckets, plan.plan.ahead()
    found: dict[int, _Short] = {}
    for excess, time, held in _above(space, plan, watch, starts, ends, target):
        # A gather that begins at its own interval cannot begin later.
        early = [h for h in held if h.early and ahead[h.bucket] > 0]
        for h in early:
            short = found.setdefault(h.bucket, _Short())
            left = bisect_left(reads, starts[h.last]) - bisect_left(reads, time)
            left = 0 if buckets[h.bucket].tiles > 1 else max(0, left)
            short.gather = left if short.gather is None else min(short.gather, left)
            # What a later gather frees need not be tiled away.
            excess -= space.scheduler.bucket_parts(h.bucket, 1)[0].unsharded
        for bucket in {h.bucket for h in held if not h.early and h.bucket in watch.tilable} if excess > 0 else ():
            if buckets[bucket].residency != "backward" and buckets[bucket].tiles < space.most_tiles[bucket]:
                short = found.setdefault(bucket, _Short())
                short.size = max(short.size, excess)
    return found


def _above(
    space: SearchSpace, plan: Candidate, watch: _Watch, starts: Sequence[float], ends: Sequence[float], target: int
) -> Iterator[tuple[int, float, list[_Held]]]:
    """Moments at which the device holds more than ``target``: by how much, when, and what could be less of it."""
    late = LATE
    events: list[tuple[float, int, int, _Held | None]] = [
        (time, order, size, None) for time, order, _, size in watch.run.events["device"]
    ]
    for held in watch.held:
        events.append((starts[held.first], -1, 1, held))  # there before it takes, and until after it gives
        events.append((starts[held.last], late, 0, held) if held.early else (ends[held.last], late - 1, 0, held))
    level, now = plan.held, dict[_Held, None]()
    for time, _, size, about in sorted(events, key=lambda event: event[:3]):
        if about is None:
            level += size
            if size > 0 and level > target:
                yield level - target, time, list(now)
        elif size:
            now[about] = None
        else:
            now.pop(about, None)
