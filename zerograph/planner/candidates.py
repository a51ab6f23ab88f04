"""The plans that a search looks at, and which of them are worth having: no other is both faster and smaller.

Decided layer by layer are which gathered buckets stay whole from forward to backward, how many of its activations a
layer saves rather than recomputes (its level), where the shards of each bucket live, and where what a layer saves waits
for the backward. Layers that are alike are interchangeable, so most candidates are counts: the first so many buckets,
and the first so many levels of layers, of fixed orders by what they gain per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import NamedTuple, TypeVar

from zerograph.core.machine import Tier
from zerograph.core.plan import Bucket, Plan, Residency
from zerograph.core.simulate import Memory, Peaks, measure
from zerograph.planner.ladder import HOMES
from zerograph.planner.rates import Rates, gathered_bytes
from zerograph.planner.regions import Profile
from zerograph.planner.schedule import Decisions, Scheduler
from zerograph.planner.sketch import sketch

T = TypeVar("T")
FINEST = 128
"""Tiles of a step up to which all operators are looked at in the most tiles there may be."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of one space with its predicted step time in seconds and the peak of every tier in bytes.

    Attributes:
        kept: buckets that stay whole until the backward.
        levels: of each layer of the profile, how many of its activations are saved.
        homes: of each bucket, as a place in :data:`~zerograph.planner.ladder.HOMES`.
        offload: layers whose saved activations leave the device, and where they go.
        tiles: of each bucket; empty where nothing is tiled.
        ahead: of each bucket, how many visits before its own it is gathered, at most; empty where all are
            ``prefetch``.
        reductions: that may be under way at a time.
        fetch_ahead: how many layers before its own what a layer offloaded begins to come back.
    """

    seconds: float
    peaks: Peaks
    space: Space
    prefetch: int
    kept: tuple[int, ...]
    levels: tuple[int, ...]
    homes: tuple[int, ...]
    offload: tuple[tuple[str, Tier], ...]
    tiles: tuple[int, ...]
    ahead: tuple[int, ...]
    reductions: int
    fetch_ahead: int

    @property
    def peak(self) -> int:
        """Of the device."""
        return self.peaks[0]

    @property
    def rank(self) -> tuple[object, ...]:
        """Faster first, then smaller, off the device before on it; ties are broken by the decisions, the same way on
        all ranks."""
        fixed = (len(self.space.plan.buckets), self.tiles, self.prefetch)
        size = (self.peaks[1:], self.peak)
        late = (self.ahead, self.reductions, self.fetch_ahead)
        return (self.seconds, *size, *fixed, self.kept, self.levels, self.homes, self.offload, *late)

    @property
    def key(self) -> Key:
        """All decisions."""
        rest = self.offload, self.tiles, self.ahead, self.reductions, self.fetch_ahead
        return Key(self.prefetch, self.kept, self.levels, self.homes, *rest)

    @property
    def plan(self) -> Plan:
        """The candidate as a plan."""
        return self.space.plan_of(self)

    @property
    def held(self) -> int:
        """Bytes that the device holds between steps."""
        moved = self.space.scheduler.moved([HOMES[home] for home in self.homes])
        return sum(size for tier, size in (*self.space.held, *moved) if tier == "device")

    def fits(self, budget: Sequence[int]) -> bool:
        """Whether no tier holds more than ``budget`` bytes."""
        return all(peak <= most for peak, most in zip(self.peaks, budget, strict=True))


class Key(NamedTuple):
    """What tells two candidates of a space apart: all decisions, as :class:`Candidate` has them."""

    prefetch: int
    kept: tuple[int, ...]
    levels: tuple[int, ...]
    homes: tuple[int, ...]
    offload: tuple[tuple[str, Tier], ...] = ()
    tiles: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    reductions: int = 1
    fetch_ahead: int = 1

    def plain(self) -> Key:
        """The one key of these decisions: what says nothing is left out of it."""
        tiles = self.tiles if any(count > 1 for count in self.tiles) else ()
        kept = tuple(sorted(bucket for bucket in self.kept if not tiles or tiles[bucket] == 1))
        ahead = self.ahead if any(one != self.prefetch for one in self.ahead) else ()
        fetch_ahead = self.fetch_ahead if self.offload else 1
        return self._replace(kept=kept, tiles=tiles, ahead=ahead, fetch_ahead=fetch_ahead)


Raise = tuple[str, int]
"""A layer and the level that it is raised to from those below."""


class Space:
    """All plans with the same buckets.

    Attributes:
        plan: one that holds what does not vary here: stage, buckets, what is recomputed when nothing is free.
        keeps: buckets that may be kept from forward to backward, the most rewarding first; none below stage 3.
        saves: layers that may be recomputed, each with a level to raise it to, the most rewarding first; none when
            levels are fixed.
        moves: buckets whose shards can leave the device, the largest first.
        home: where shards live unless told, as a place in :data:`~zerograph.planner.ladder.HOMES`.
        most_tiles: of each bucket; 1 where it cannot be tiled.
        size: bytes of a bucket, at most, unless one parameter is larger.
        work: tasks that were simulated so far.
    """

    def __init__(
        self, profile: Profile, plan: Plan, rates: Rates, held: Memory, *, keep: bool, save: bool, home: int = 0,
        moments: int = 2, most_tiles: tuple[int, ...] = (), size: int = 0,
    ) -> None:  # fmt: skip
        self.plan, self.held, self.home, self.size = plan, held, home, size
        self.most_tiles = most_tiles or (1,) * len(plan.buckets)
        self._whole = (1,) * len(plan.buckets)
        params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
        self.scheduler = Scheduler(profile, params, names, rates, moments)
        self.keeps = tuple(_keeps(plan, rates)) if keep and profile.training else ()
        self.saves = tuple(_saves(profile, rates)) if save and profile.training else ()
        self.moves = tuple(_moves(plan, self.scheduler)) if profile.training else ()
        self._trained = {b.index for b in plan.buckets if any(p.sharded and p.trainable for p in b.params)}
        self.work = 0
        self._known: dict[Key, Candidate] = {}
        self._layer = {layer: i for i, layer in enumerate(profile.layers)}
        self._fixed = profile.levels(plan.recompute, plan.save)

    def candidate(
        self,
        prefetch: int,
        kept: Iterable[int],
        saved: Iterable[Raise],
        homes: tuple[int, ...] = (),
        offload: tuple[tuple[str, Tier], ...] = (),
        tiles: tuple[int, ...] = (),
        ahead: tuple[int, ...] = (),
    ) -> Candidate:
        """The plan that keeps the buckets ``kept``, but for those in tiles, and recomputes all of the free layers but
        for what they are raised to by ``saved``.

        Args:
            homes: of each bucket; where none are told, all that can leave live at :attr:`home`.
            offload: layers whose saved activations leave the device, in order of the layers.
            tiles, ahead: of each bucket; not tiled, and gathered ``prefetch`` visits ahead, unless told.
        """
        levels = self.raised(saved) if self.saves else self._fixed
        homes = homes or self.placed((bucket, self.home) for bucket in self.moves)
        return self.of(Key(prefetch, tuple(kept), levels, homes, offload, tiles, ahead))

    def saved(self, levels: Sequence[int]) -> dict[str, tuple[str, ...]]:
        """The activations that each layer saves at its level."""
        profile = self.scheduler.profile
        found: dict[str, dict[str, None]] = {layer: {} for layer in profile.layers}
        for life in profile.lives:
            layer = profile.regions[life.start].layer
            if life.activation and levels[self._layer[layer]] in life.saved:
                found[layer][life.activation] = None
        return {layer: tuple(names) for layer, names in found.items()}

    @property
    def choices(self) -> list[list[int]]:
        """The levels that each layer may have; none where they are fixed."""
        if not self.saves:
            return []
        found = [[0] for _ in self._layer]
        for layer, level in self.saves:
            found[self._layer[layer]].append(level)
        return found

    def raised(self, saved: Iterable[Raise]) -> tuple[int, ...]:
        """The level of every layer: the highest that it is raised to."""
        levels = [0] * len(self._layer)
        for layer, level in saved:
            levels[self._layer[layer]] = max(level, levels[self._layer[layer]])
        return tuple(levels)

    def of(self, key: Key) -> Candidate:
        """The candidate of ``key``."""
        key = key.plain()
        if key not in self._known:
            decisions = self.decisions(key)
            scheduler = self.scheduler
            held = self.held + scheduler.moved(decisions.homes)
            seconds, peaks, tasks = measure(sketch(scheduler, decisions), scheduler.costs, held)
            self.work += tasks
            self._known[key] = Candidate(seconds, peaks, self, *key)
        return self._known[key]

    @property
    def finest(self) -> tuple[int, ...]:
        """The most tiles that are looked at everywhere at once: those of the size where so many would take too long."""
        return self.most_tiles if sum(self.most_tiles) <= FINEST + len(self.most_tiles) else self.in_tiles()

    def in_tiles(self) -> tuple[int, ...]:
        """Tiles of every bucket that may be tiled, as few as make each fit the size, if it may be so many."""
        return tuple(
            max(1, min(-(-bucket.gathered_bytes // max(1, self.size)), most))
            for bucket, most in zip(self.plan.buckets, self.most_tiles, strict=True)
        )

    def placed(self, chosen: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """The home of every bucket, of which ``chosen`` tells some; what has nothing to move there stays."""
        found = [0] * len(self.plan.buckets)
        for bucket, home in chosen:
            if bucket in self._trained or HOMES[home].parameters != "device":
                found[bucket] = home
        return tuple(found)

    def counted(self, prefetch: int, kept: int, saved: int, tiles: tuple[int, ...] = ()) -> Candidate:
        """The plan that keeps the first ``kept`` buckets, and saves as the first ``saved`` of :attr:`saves` say."""
        return self.candidate(prefetch, self.keeps[:kept], self.saves[:saved], tiles=tiles)

    def plan_of(self, found: Candidate) -> Plan:
        """The plan with the decisions of ``found``."""
        decided = self.decisions(found.key)
        ahead = [None if one == found.prefetch else one for one in decided.ahead] or [None] * len(self.plan.buckets)
        buckets = tuple(
            replace(b, residency=residency, homes=homes, tiles=tiles, ahead=later)
            for b, residency, homes, tiles, later in zip(
                self.plan.buckets, decided.residency, decided.homes, decided.tiles, ahead, strict=True
            )
        )
        recompute, save = self.plan.recompute, self.plan.save
        if self.saves:
            recompute, save = self.scheduler.profile.recomputed(found.levels)
        return replace(
            self.plan, prefetch=found.prefetch, buckets=buckets, recompute=recompute, save=save, offload=found.offload,
            reductions=found.reductions, fetch_ahead=found.fetch_ahead,
        )  # fmt: skip

    def decisions(self, key: Key) -> Decisions:
        """A key as the scheduler takes it."""
        residency: list[Residency] = [bucket.residency for bucket in self.plan.buckets]
        for index in key.kept:
            residency[index] = "backward"
        places = [HOMES[home] for home in key.homes]
        rest = key.offload, key.ahead, key.reductions, key.fetch_ahead
        return Decisions(residency, places, key.tiles or self._whole, key.prefetch, key.levels, *rest)


def _keeps(plan: Plan, rates: Rates) -> list[int]:
    def reward(bucket: Bucket) -> float:
        size = gathered_bytes(bucket.params, rates.world_size)
        return rates.collective(size) / max(1, size)

    return [b.index for b in _by_reward(plan.buckets, reward)]


def _moves(plan: Plan, scheduler: Scheduler) -> list[int]:
    def reward(bucket: Bucket) -> float:
        shards = scheduler.transfers(bucket.index, 1)[0].shards
        return shards.optimizer + shards.frozen

    return [b.index for b in _by_reward(plan.buckets, reward) if reward(b)]


def _saves(profile: Profile, rates: Rates) -> list[Raise]:
    """Levels of layers in the order of the seconds of recomputation that each saves, per byte that it takes."""
    top = profile.all_saved
    seconds = {layer: [0.0] * (top + 1) for layer in profile.layers}
    size = {layer: [0] * (top + 1) for layer in profile.layers}
    for region in profile.regions:
        if region.layer in seconds:
            for level, work in enumerate(region.work):
                cost = rates.compute(sum(a.flops for a in work.atoms), sum(a.moved for a in work.atoms))
                seconds[region.layer][level] += cost
    for life in profile.lives:
        layer = profile.regions[life.start].layer
        for level in life.saved if layer in size else ():
            size[layer][level] += life.bytes
    rewards: dict[Raise, float] = {}
    for layer, spared in zip(profile.layers, profile.spared, strict=True):
        before = 0
        for level in range(1, top + 1):
            if level < top and spared[level - 1] in (frozenset(), *spared[: level - 1]):
                continue  # the same as one before
            gain = seconds[layer][before] - seconds[layer][level]
            rewards[layer, level] = gain / max(1, size[layer][level] - size[layer][before])
            before = level
    return _by_reward(list(rewards), rewards.__getitem__)


def _by_reward(items: Sequence[T], reward: Callable[[T], float]) -> list[T]:
    """The most rewarding first. Equally rewarding ones from the last, which are needed for the shortest time, then
    evenly spread, so that what is left over overlaps with what is not."""
    groups: dict[float, list[T]] = {}
    for item in items:
        groups.setdefault(float(f"{reward(item):.6g}"), []).append(item)  # what differs by rounding is alike
    return [item for value in sorted(groups, reverse=True) for item in spread(groups[value])]


def spread(items: Sequence[T]) -> list[T]:
    """The last, then those in the middle of the largest gaps (van der Corput's sequence)."""
    order = sorted(range(len(items)), key=lambda i: _reversed_bits(len(items) - 1 - i, len(items)))
    return [items[i] for i in order]


def _reversed_bits(number: int, count: int) -> int:
    width = max(1, (count - 1).bit_length())
    return int(f"{number:0{width}b}"[::-1], 2)


class Place(NamedTuple):
    """Where a search begins: a space, a number of buckets gathered ahead, and tiles; empty where nothing is tiled."""

    space: Space
    prefetch: int
    tiles: tuple[int, ...] = ()

    @property
    def keeps(self) -> tuple[int, ...]:
        """Buckets that may be kept: tiled ones are whole only in part."""
        return tuple(b for b in self.space.keeps if not self.tiles or self.tiles[b] == 1)


def frontier(found: Iterable[Candidate]) -> list[Candidate]:
    """Those than which no other is as fast and no larger on any tier, the smallest on the device first."""
    best: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.peaks, c.rank)):
        # Earlier ones hold no more on the device, so the other tiers and the time decide.
        seconds, rest = candidate.seconds, candidate.peaks[1:]
        if not any(b.seconds <= seconds and all(map(le, b.peaks[1:], rest)) for b in reversed(best)):
            best.append(candidate)
    return best
