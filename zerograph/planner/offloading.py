"""Plans that offload: a local search over homes of shards, homes of activations, residency and recomputation together.

Buckets and layers are taken in at most :data:`GROUPS` groups each, whatever the depth. It begins with plans that treat
all groups alike. Those that need the least of each tier are always looked at, so that a deep step is not called
infeasible because it is deep. It goes on from those that no other beats in time and in the memory of every tier, one
group changed at a time (Pareto local search; Paquete et al. 2004). Groups that are alike are interchangeable, so only
one of them is changed. When nothing better is found there, it goes on from plans that were beaten. It ends when there
is nothing left to look at, or :data:`WORK` tasks were simulated beside the first plans. No budget enters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import inf
from operator import le
from typing import TypeVar

from zerograph.core.machine import Tier
from zerograph.planner.candidates import Candidate, Place, Raise, Space
from zerograph.planner.ladder import HOMES

T = TypeVar("T")
GROUPS = 4
WORK = 60_000
"""Tasks that are simulated by the local search, at most: about half a second."""


def every_home(space: Space, homes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to place the buckets of ``space``."""
    for chosen in product(homes, repeat=len(space.moves)):
        yield space.placed(zip(space.moves, chosen, strict=True))


def every_offload(space: Space, tiers: Sequence[Tier]) -> Iterator[tuple[tuple[str, Tier], ...]]:
    """All ways to place what layers save."""
    layers = space.scheduler.profile.layers if tiers else ()
    places: tuple[Tier, ...] = ("device", *tiers)
    for chosen in product(places, repeat=len(layers)):
        yield tuple((layer, tier) for layer, tier in zip(layers, chosen, strict=True) if tier != "device")


def corners(
    spaces: Sequence[Space], homes: Sequence[int], tiers: Sequence[Tier], prefetch: int, *, tile: bool = True
) -> Iterator[Candidate]:
    """Plans that need the least of each tier: the smallest buckets, nothing kept or saved.

    Args:
        tile: whether they are looked at in most tiles, too, where tiles are open.
    """
    space = spaces[0]
    profile, finest = space.scheduler.profile, space.finest
    waits = [(), *(tuple((layer, tier) for layer in profile.layers) for tier in tiers if profile.training)]
    looked_at: list[tuple[tuple[int, ...], Sequence[tuple[tuple[str, Tier], ...]]]] = [((), waits)]
    if tile and max(finest, default=1) > 1:
        looked_at.append((finest, waits[:1]))  # tiles cost many tasks
    for tiles, offloads in looked_at:
        for home in _one_tier(homes) if profile.training else homes[:1]:
            placed = space.placed((bucket, home) for bucket in space.moves)
            for offload in offloads:
                yield space.candidate(prefetch, (), (), placed, offload, tiles)


@dataclass(frozen=True, slots=True)
class _Groups:
    """What a state decides about, in groups; and of each group what makes two alike."""

    keeps: tuple[tuple[int, ...], ...]
    saves: tuple[tuple[Raise, ...], ...]
    moves: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[str, ...], ...]
    alike: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class _State:
    """One value per group: kept or not, saved or not, the home of shards, and that of activations (0 the device)."""

    place: int
    values: tuple[tuple[int, ...], ...]


class Offloading:
    """Candidates that offload something, from places (buckets, tiles and prefetch) that were worthwhile without.

    Attributes:
        candidates: everything that was looked at.
    """

    def __init__(self, homes: Sequence[int], tiers: Sequence[Tier], places: Sequence[Place], work: int = WORK) -> None:
        self.homes, self.tiers, self.places = homes, tiers, places
        self._end: float = inf
        self.groups = [_grouped(place) for place in places]
        self.candidates: list[Candidate] = []
        self._best: list[tuple[Candidate, _State]] = []
        self._beaten: deque[_State] = deque()
        self._seen: set[_State] = set()
        self._explore(work)

    def _explore(self, work: int) -> None:
        fresh = self._better(self._corners())
        self._end = work + self._work
        fresh += self._better(self._seeds())
        while self._work < self._end and (fresh or self._beaten):
            if fresh:
                at = [state for candidate, state in fresh if self._holds(candidate)]
            else:  # nothing next to the best is better; what was beaten may lead on
                at = [self._beaten.popleft()]
            fresh = self._better(state for found in at for state in self._next(found))

    def _better(self, states: Iterator[_State]) -> list[tuple[Candidate, _State]]:
        """Those of ``states`` that none so far beats, fastest first."""
        fresh = []
        for state in states:
            if state in self._seen:
                continue
            if self._work >= self._end:
                break
            self._seen.add(state)
            candidate = self._candidate(state)
            self.candidates.append(candidate)
            if not any(_beats(other, candidate) for other, _ in self._best):
                self._best = [pair for pair in self._best if not _beats(candidate, pair[0])]
                self._best.append((candidate, state))
                fresh.append((candidate, state))
            else:
                self._beaten.append(state)
        return sorted(fresh, key=lambda pair: pair[0].rank)

    @property
    def _work(self) -> int:
        """Tasks that were simulated so far, in all spaces."""
        return sum(space.work for space in {id(space): space for space, _, _ in self.places}.values())

    def _holds(self, candidate: Candidate) -> bool:
        """Whether nothing has beaten it since."""
        return any(other is candidate for other, _ in self._best)

    def _candidate(self, state: _State) -> Candidate:
        space, prefetch, tiles = self.places[state.place]
        groups, (kept, saved, homes, waits) = self.groups[state.place], state.values
        moved = [(bucket, home) for group, home in zip(groups.moves, homes, strict=True) for bucket in group]
        offloaded = [
            (layer, self.tiers[tier - 1])
            for group, tier in zip(groups.layers, waits, strict=True)
            for layer in group
            if tier
        ]
        whole, spared = _chosen(groups.keeps, kept), _chosen(groups.saves, saved)
        return space.candidate(prefetch, whole, spared, space.placed(moved), tuple(offloaded), tiles)

    def _corners(self) -> Iterator[_State]:
        """All groups alike, all shards on one tier: what needs the least of each tier is among these.

        The last place is the fastest; the others are for plans that are short of memory, so nothing is saved there.
        """
        homes = _one_tier(self.homes)
        fastest = len(self.places) - 1
        for place in range(len(self.places)):
            for saved in (0, 1) if place == fastest else (0,):
                for tier, home in product(range(len(self.tiers) + 1), homes):
                    yield self._alike(place, saved, home, tier)

    def _seeds(self) -> Iterator[_State]:
        """All groups alike, the likeliest first: all shards on one tier before mixtures, the fastest place first."""
        tiers = range(len(self.tiers) + 1)
        seeds = list(product(range(len(self.places)), tiers, (1, 0), self.homes))
        seeds.sort(key=lambda seed: (not _on_one_tier(seed[3]), -seed[0]))
        yield from (self._alike(place, saved, home, tier) for place, tier, saved, home in seeds)

    def _alike(self, place: int, saved: int, home: int, tier: int) -> _State:
        """The state that keeps nothing and treats all groups alike."""
        groups = self.groups[place]
        sizes = (len(groups.keeps), len(groups.saves), len(groups.moves), len(groups.layers))
        return _State(place, tuple((value,) * n for value, n in zip((0, saved, home, tier), sizes, strict=True)))

    def _next(self, state: _State) -> Iterator[_State]:
        tiers = range(len(self.tiers) + 1)
        flips = ((0, 1), (1, 0))
        steps = (flips, flips, list(permutations(self.homes, 2)), list(permutations(tiers, 2)))
        alike = self.groups[state.place].alike
        for what, changes in enumerate(steps):
            values = state.values[what]
            for old, new in changes:
                for at in _one_of_each(values, alike[what], old, first=new > old):
                    changed = (*values[:at], new, *values[at + 1 :])
                    yield replace(state, values=(*state.values[:what], changed, *state.values[what + 1 :]))


def _beats(a: Candidate, b: Candidate) -> bool:
    return a.seconds <= b.seconds and all(map(le, a.peaks, b.peaks))


def _one_tier(homes: Sequence[int]) -> Sequence[int]:
    """Those of ``homes`` that are on one tier; all where none is, as what leaves the device was fixed."""
    return [home for home in homes if _on_one_tier(home)] or homes


def _on_one_tier(home: int) -> bool:
    homes = HOMES[home]
    return homes.parameters == homes.gradients == homes.optimizer


def _chosen(groups: Sequence[tuple[T, ...]], values: Sequence[int]) -> list[T]:
    return [item for group, value in zip(groups, values, strict=True) if value for item in group]


def _one_of_each(values: Sequence[int], alike: Sequence[object], old: int, *, first: bool) -> list[int]:
    """Groups that have the value ``old``, one of those that are alike: the first, or the last."""
    found: dict[object, int] = {}
    for at, value in enumerate(values):
        if value == old and (not first or alike[at] not in found):
            found[alike[at]] = at
    return list(found.values())


def _grouped(place: Place) -> _Groups:
    space = place.space
    scheduler = space.scheduler
    size = dict.fromkeys(scheduler.profile.layers, 0)
    for life in scheduler.profile.lives:
        layer = scheduler.profile.regions[life.start].layer
        if layer in size and life.saved:
            size[layer] += life.bytes

    def bucket(index: int) -> object:
        part = scheduler.transfers(index, 1)[0]
        return part.whole, part.shards

    keeps, saves, moves = _split(place.keeps), _split(space.saves), _split(space.moves)
    layers = _split(scheduler.profile.layers)
    alike = (
        tuple(tuple(map(bucket, group)) for group in keeps),
        tuple(tuple((size[layer], level) for layer, level in group) for group in saves),
        tuple(tuple(map(bucket, group)) for group in moves),
        tuple(tuple(size[layer] for layer in group) for group in layers),
    )
    return _Groups(keeps, saves, moves, layers, alike)


def _split(items: Sequence[T]) -> tuple[tuple[T, ...], ...]:
    """``items`` in at most :data:`GROUPS` runs of about the same length."""
    count = min(GROUPS, len(items))
    return tuple(tuple(items[i * len(items) // count : (i + 1) * len(items) // count]) for i in range(count))
