"""The plan with the least predicted step time that fits a memory budget.

What is free is searched: which buckets stay gathered from forward to backward, which layers are recomputed, bucket size
and prefetch. Every candidate is simulated. Which candidates are looked at does not depend on the budget: a coarse grid
of counts, and what lies between neighbours of it that no other beats in both time and memory. More budget therefore
never finds a slower plan. Steps that are small enough are searched completely.

Where something may leave the device, homes of shards and of saved activations are searched with all of that
(:mod:`~zerograph.planner.offloading`), and peaks of all tiers count. Plans that offload nothing are looked at as
without it: another tier never makes a plan slower.

All ranks that are given the same step, machine and budget find the same plan.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, pairwise, product
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

from zerograph.core.config import DEFAULT_BUCKET_SIZE, DEFAULT_PREFETCH, Config, Recompute
from zerograph.core.garbage import uncollected
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.plan import Offload, Plan, compute_dtype
from zerograph.core.simulate import Memory
from zerograph.core.step import Step
from zerograph.planner.candidates import Candidate, Place, Raise, Space, frontier, spread
from zerograph.planner.ladder import open_homes, open_tiers
from zerograph.planner.liveness import Graph, Mode
from zerograph.planner.loss import head_of, loss_tiles, tiled
from zerograph.planner.offloading import WORK, Offloading, corners, every_home, every_offload
from zerograph.planner.rates import Rates, state_bytes
from zerograph.planner.regions import Profile, profile
from zerograph.planner.relief import least, relieved, varied, waiting_longer
from zerograph.planner.rules import plan_step
from zerograph.planner.selective import stops

T = TypeVar("T")
MIB = 2**20
BUCKET_SIZES = (8 * MIB, 16 * MIB, DEFAULT_BUCKET_SIZE, 64 * MIB, 128 * MIB)
PREFETCHES = (0, DEFAULT_PREFETCH, 2, 4)
GRID = 2
"""Steps of a count in the coarse grid."""
HALVINGS = 3
"""Times that what lies between two neighbours of the frontier is halved."""
SPACES = 2
"""Pairs of bucket size and prefetch of which the counts are searched."""
COMPLETE = 1100
"""Candidates up to which all are looked at."""
MOST_TILES = 16
"""Tiles of one parameter, at most: each costs a collective of its own, and the planner a few tasks."""
ALL_TILES = 1024
"""Tiles of a step, at most, unless two of each parameter are more: a plan of so many takes the planner 0.1 s."""


FEW = 8
"""Buckets up to which single changes of the best plans are tried, whatever the number of candidates."""
RELIEVED = 6
"""Plans whose peaks are relieved (:mod:`~zerograph.planner.relief`), of those that stay and of those that offload."""
FASTEST = 8
"""Plans that offload activations, the fastest, of which it is looked at what coming back earlier does."""
RELIEF = 30_000
"""Tasks that are simulated for that, of either."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user fixed; None and "auto" leave the choice to the search.

    Attributes:
        stage: 0 to 3 fix every bucket's residency; "auto" shards parameters and chooses it per bucket.
        world_size: ranks to shard over.
        bucket_size: bytes of gathered parameters per bucket, at most.
        prefetch: buckets gathered ahead, at most.
        recompute: as in :class:`~zerograph.core.config.Config`; "auto" chooses per layer.
        offload: what leaves the device. "none"; "optimizer", "gradients" or "parameters", each with those before it;
            or "auto", per bucket. Unless it is none, saved activations may leave too, per layer, and parameters larger
            than a bucket may be tiled.
        tier: where it goes, "host" or "nvme"; None leaves that open.
        tile: whether large parameters may be tiled; None as ``offload`` has it.
    """

    stage: Literal[0, 1, 2, 3, "auto"]
    world_size: int
    bucket_size: int | None = None
    prefetch: int | None = None
    recompute: Recompute = "auto"
    offload: Offload | Literal["auto"] = "none"
    tier: Tier | None = None
    tile: bool | None = None

    @classmethod
    def of(cls, config: Config, world_size: int, **fixed: Any) -> Wish:
        """What was given to ``config``; ``fixed`` are further fields."""
        return cls(
            config.stage,
            world_size,
            bucket_size=config.bucket_size if "bucket_size" in config.given else None,
            prefetch=config.prefetch if "prefetch" in config.given else None,
            recompute=config.recompute,
            **fixed,
        )

    @property
    def sharding(self) -> int:
        """The stage that says what is sharded."""
        return 3 if self.stage == "auto" else self.stage

    @property
    def tiles(self) -> bool:
        """Whether tilings are looked at: only what is gathered for each use can be tiled."""
        wanted = self.offload != "none" if self.tile is None else self.tile
        return wanted and self.sharding == 3


class Way(NamedTuple):
    """A step with its loss whole, or in tiles, each of which reads the parameters ``head`` whole."""

    profile: Profile
    loss_tiles: int = 1
    head: tuple[str, ...] = ()


class Search:
    """Candidates for one step on one machine; ask :meth:`within` for the best of any budget."""

    def __init__(
        self, step: Step, wish: Wish, machine: Machine, *, states: int | None = None, moments: int = 2,
        complete: int = COMPLETE, work: int = WORK,
    ) -> None:  # fmt: skip
        """
        Args:
            states: bytes on the device between steps; default: shards and optimizer states of the step's parameters.
            moments: tensors that the optimizer keeps per parameter.
            complete: number of candidates up to which all are looked at.
            work: tasks that are simulated by the local search for plans that offload, at most; twice as many where
                all of them do.
        """
        self.wish, self.moments = wish, moments
        with uncollected():
            self._search(step, machine, states, moments, complete, work)

    def _search(self, step: Step, machine: Machine, states: int | None, moments: int, complete: int, work: int) -> None:
        wish = self.wish
        self.ways = _ways(Graph(step), wish, machine)
        self.states = sum(state_bytes(step.params, wish.world_size, moments)) if states is None else states
        self.tiers = open_tiers(machine, wish.world_size, wish.offload, wish.tier)
        self.homes = open_homes(wish.offload, self.tiers, wish.sharding)
        spaces = partial(_spaces, step, wish, machine, self.states, moments, self.homes[0])
        self.spaces, *parts = [list(spaces(way)) for way in self.ways]
        prefetches = PREFETCHES if wish.prefetch is None else (wish.prefetch,)
        if not step.params or not step.training:
            prefetches = (DEFAULT_PREFETCH if wish.prefetch is None else wish.prefetch,)
        whole = [Place(space, prefetch) for space in self.spaces for prefetch in prefetches]
        some = prefetches if wish.prefetch is not None else prefetches[:2]
        in_tiles = list(_in_tiles([*self.spaces, *chain(*parts)], some))
        places = [*whole, *in_tiles]
        found: list[Candidate] = []
        few = all(len(space.plan.buckets) <= FEW for space in self.spaces)
        stays = self.homes[0] == 0
        if stays:  # what may stay is looked at as where nothing can be offloaded: more tiers lose nothing
            found += _staying(whole, complete)
            found += corners(self.spaces, (0,), (), min(prefetches), tile=False)
            found += waiting_longer(spread(frontier(found))[:RELIEVED])
            found += _relieved(found, tile=False, small=few or _count(whole, (0,), ()) <= complete)
        if self.tiers or in_tiles:
            if stays:  # where it is the loss that is tiled, and no parameter, the rest is as free as without tiles
                found += _staying([p for p in in_tiles if p.space.plan.loss_tiles > 1 and not p.tiles], complete)
            small = _count(places, self.homes, self.tiers) <= complete
            if small:
                found += (c for place in places for c in _all(place, self.homes, self.tiers))
            elif step.training:
                chosen = [*(_worthwhile(in_tiles)[:1] if in_tiles else []), *_worthwhile(whole)]
                found += Offloading(self.homes, self.tiers, chosen, work * (2 - stays)).candidates
            for every in (self.spaces, *parts):
                found += corners(every, self.homes, self.tiers, min(prefetches))
            moving = [c for c in frontier(found) if c.offload]
            found += waiting_longer([*sorted(moving, key=lambda c: c.rank)[:FASTEST], *spread(moving)[:RELIEVED]])
            found += _relieved(found, tile=wish.tiles, small=small or few, tiers=self.tiers)
        self.best = frontier(found)

    @property
    def smallest(self) -> Candidate:
        """The one that needs the least memory."""
        return self.best[0]

    def closest(self, budget: int | Mapping[Tier, int]) -> Candidate:
        """The one that overruns the tiers of ``budget`` by the smallest share."""
        return min(self.best, key=lambda c: (over(c, budget), c.rank))

    def within(self, budget: int | Mapping[Tier, int]) -> Candidate | None:
        """The fastest whose peaks are at most ``budget`` bytes; None when none is.

        Args:
            budget: per tier, none where one is missing; a number is the device's, and leaves the others unlimited.
        """
        most = limits(budget)
        return min((c for c in self.best if c.fits(most)), key=lambda c: c.rank, default=None)


def smallest(
    step: Step, wish: Wish, machine: Machine, states: int, moments: int, known: Sequence[Way] = ()
) -> list[Candidate]:
    """Those plans of a :class:`Search` that need the least of each tier, at a small part of its cost.

    Args:
        known: the step's ways, where there are some already.
    """
    wish = replace(wish, bucket_size=BUCKET_SIZES[0] if wish.bucket_size is None else wish.bucket_size)
    tiers = open_tiers(machine, wish.world_size, wish.offload, wish.tier)
    homes = open_homes(wish.offload, tiers, wish.sharding)
    with uncollected():
        found: list[Candidate] = []
        for way in known or _ways(Graph(step), wish, machine):
            spaces = list(_spaces(step, wish, machine, states, moments, homes[0], way))
            found += corners(spaces, homes, tiers, wish.prefetch or 0)
        return [*found, *(least(plan, tile=wish.tiles) for plan in frontier(found))]


def _ways(graph: Graph, wish: Wish, machine: Machine) -> list[Way]:
    """The step with its loss whole and, where tiles are open, in each number of tiles.

    Each has the levels between nothing and all saved where the search may choose them. Those are of layers, which the
    tiles of the loss do not touch.
    """
    base: Mode = "none" if wish.recompute == "none" else "auto"
    spared = {}
    if wish.recompute == "auto" and graph.step.training:
        spared = stops(graph, Rates(machine, wish.world_size, compute_dtype(graph.step.params)))
    found = [Way(profile(graph, base, spared))]
    head = head_of(graph) if wish.tiles else None
    if head is not None:
        for tiles in loss_tiles(head, wish.bucket_size or DEFAULT_BUCKET_SIZE):
            parts = profile(tiled(graph.step, head, tiles), base, spared)
            found.append(Way(parts, tiles, head.params))
    return found


def over(candidate: Candidate, budget: int | Mapping[Tier, int]) -> float:
    """By what share of its budget the fullest tier is overrun; 0 or less when all fit."""
    return max((peak - most) / max(1, most) for peak, most in zip(candidate.peaks, limits(budget), strict=True))


def limits(budget: int | Mapping[Tier, int]) -> tuple[int, ...]:
    """Bytes that each of :data:`~zerograph.core.machine.TIERS` may hold."""
    if isinstance(budget, int):
        return (budget, *(sys.maxsize for _ in TIERS[1:]))
    return tuple(budget.get(tier, 0) for tier in TIERS)


def _spaces(
    step: Step, wish: Wish, machine: Machine, states: int, moments: int, home: int, way: Way
) -> Iterator[Space]:
    """One per distinct way to put parameters into buckets and tiles."""
    sizes = BUCKET_SIZES if wish.bucket_size is None else (wish.bucket_size,)
    seen = set()
    held: Memory = (("device", states),)
    for size in sizes:
        plan = plan_step(
            step,
            stage=wish.sharding,
            world_size=wish.world_size,
            bucket_size=size,
            prefetch=DEFAULT_PREFETCH,
            recompute=wish.recompute,
        )
        plan = replace(plan, loss_tiles=way.loss_tiles)
        rates = Rates(machine, wish.world_size, plan.compute_dtype)
        tiles = most_tiles(plan, size, way.head) if wish.tiles else ()
        if plan not in seen:
            seen.add(plan)
            keep, save = wish.stage == "auto", wish.recompute == "auto"
            yield Space(
                way.profile,
                plan,
                rates,
                held,
                keep=keep,
                save=save,
                home=home,
                moments=moments,
                most_tiles=tiles,
                size=size,
            )


def most_tiles(plan: Plan, size: int, whole: Container[str] = ()) -> tuple[int, ...]:
    """In how many tiles each bucket may be: 1 unless it is one parameter that is larger than ``size`` when gathered,
    and none of those that have to be ``whole``."""
    alone = (b for b in plan.buckets if len(b.params) == 1 and b.params[0].sharded and b.params[0].name not in whole)
    large = {b.index for b in alone if b.gathered_bytes > size}
    most = min(MOST_TILES, max(2, ALL_TILES // max(1, len(large))))
    return tuple(min(most, b.params[0].chunk_rows(plan.world_size)) if b.index in large else 1 for b in plan.buckets)


def _in_tiles(spaces: Sequence[Space], prefetches: Sequence[int]) -> Iterator[Place]:
    """Everything in tiles that may be, or the loss alone; in buckets of sizes in between there is little to gain."""
    for space in spaces:
        if space.size not in (spaces[0].size, DEFAULT_BUCKET_SIZE):
            continue
        tiles = space.in_tiles()
        if max(tiles, default=1) > 1:
            yield from (Place(space, prefetch, tiles) for prefetch in prefetches)
        if space.plan.loss_tiles > 1:
            yield from (Place(space, prefetch) for prefetch in prefetches)


def _relieved(plans: Iterable[Candidate], *, tile: bool, small: bool, tiers: Sequence[Tier] = ()) -> list[Candidate]:
    """Plans whose peaks are lower than those of some of the best of ``plans``, evenly spread among them.

    Args:
        tile: whether operators may be tiled for it.
        small: whether single changes of all the best are tried, too: of steps of a few buckets.
        tiers: that saved activations may wait on, one by one.
    """
    best = frontier(plans)
    found = list(relieved(spread(best)[:RELIEVED], tile=tile, work=RELIEF))
    if small:
        found += varied(frontier([*best, *found]), tile=tile, tiers=tiers, work=RELIEF)
    return found


def _count(places: Iterable[Place], homes: Sequence[int], tiers: Sequence[Tier]) -> int:
    return sum(_size(place, homes, tiers) for place in places)


def _size(place: Place, homes: Sequence[int], tiers: Sequence[Tier]) -> int:
    """How many plans a place has."""
    space = place.space
    layers = len(space.scheduler.profile.layers) if tiers else 0
    placed: int = len(homes) ** len(space.moves) * (1 + len(tiers)) ** layers
    return (placed << len(place.keeps)) * prod(map(len, space.choices))


def _all(place: Place, homes: Sequence[int], tiers: Sequence[Tier]) -> Iterator[Candidate]:
    space, prefetch, tiles = place
    for placed in every_home(space, homes):
        for offload in every_offload(space, tiers):
            for kept in _subsets(place.keeps):
                for saved in _every_level(space):
                    yield space.candidate(prefetch, kept, saved, placed, offload, tiles)


def _staying(places: Sequence[Place], complete: int) -> Iterator[Candidate]:
    """Plans that offload nothing: all of them, or a grid of counts and what lies between those on its frontier."""
    if _count(places, (0,), ()) <= complete:
        for place in places:
            yield from _all(place, (0,), ())
        yield from _started(places, complete)
        return
    points = {p.candidate: p for place in _worthwhile(places) for p in _grid(place)}
    for _ in range(HALVINGS):
        best = [points[c] for c in frontier(points)]
        pairs = chain.from_iterable(
            pairwise(p for p in best if p.place == place) for place in dict.fromkeys(p.place for p in best)
        )
        points |= {p.candidate: p for p in dict.fromkeys(a.between(b) for a, b in pairs)}
    yield from points


def _started(places: Sequence[Place], complete: int) -> Iterator[Candidate]:
    """All plans of ``places`` with all starts of all gathers, as far as that many may be looked at."""
    for space, prefetch, _ in places:
        buckets = len(space.plan.buckets)
        complete -= ((prefetch + 1) ** buckets << len(space.keeps)) * prod(map(len, space.choices))
        if complete < 0 or not space.scheduler.rates.overlaps:
            return
        for ahead in product(range(prefetch + 1), repeat=buckets):
            for kept, saved in product(_subsets(space.keeps), _every_level(space)):
                yield space.candidate(prefetch, kept, saved, ahead=ahead)


def _every_level(space: Space) -> Iterator[list[Raise]]:
    """All ways to choose the levels of layers."""
    for levels in product(*space.choices):
        yield list(zip(space.scheduler.profile.layers, levels, strict=False))


def _subsets(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def _worthwhile(places: Sequence[Place]) -> list[Place]:
    """Those that are fastest or smallest with nothing kept and everything saved."""
    seen: dict[Candidate, Place] = {}
    for place in places:
        space, prefetch, tiles = place
        seen.setdefault(space.counted(prefetch, 0, len(space.saves), tiles), place)
    best = frontier(seen)
    chosen = {round(k * (len(best) - 1) / (SPACES - 1)) for k in range(SPACES)}
    return [seen[best[k]] for k in sorted(chosen)]


class _Point(NamedTuple):
    """A plan that keeps the first so many buckets, and saves as the first so many raises say."""

    place: Place
    kept: int
    saved: int

    @property
    def candidate(self) -> Candidate:
        return self.place.space.counted(self.place.prefetch, self.kept, self.saved)

    def between(self, other: _Point) -> _Point:
        """The point in the middle."""
        return _Point(self.place, (self.kept + other.kept) // 2, (self.saved + other.saved) // 2)


def _grid(place: Place) -> Iterator[_Point]:
    for kept in _steps(len(place.space.keeps)):
        for saved in _steps(len(place.space.saves)):
            yield _Point(place, kept, saved)


def _steps(count: int) -> list[int]:
    return sorted({round(k * count / GRID) for k in range(GRID + 1)})
