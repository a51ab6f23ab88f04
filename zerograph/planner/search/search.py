"""The plan with the least predicted step time that fits a memory budget.

One local search over all that is free (Pareto local search; Paquete et al. 2004). It begins with the plan that the
rules make, and with those that need the least of each tier, in buckets of each size. From plans that no other beats in
both time and the memory of every tier it turns one knob at a time (:mod:`~zerograph.planner.search.knobs`): for all
items, then, between two neighbours, for half of what tells them apart, those first that save the most seconds per byte,
then for fewer items. In small steps it looks at every plan, but for those that differ only in when something begins.
Where a plan has its peak, gathers wait and operators are tiled (:mod:`~zerograph.planner.search.peaks`). Every plan is
simulated.

A local search may miss what it finds with less to turn. Where nothing is fixed it therefore also looks as if one thing
were, so that fixing one never helps; in large steps at fewer things.

No budget enters, so more of one never finds a slower plan. Plans that stay on the device are searched as where nothing
can leave it, and then the rest from there: another tier never makes a plan slower either. All ranks that are given the
same step, machine and budget find the same plan.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import Any, Literal, NamedTuple

from zerograph.core.config import DEFAULT_BUCKET_SIZE, DEFAULT_PREFETCH, Config, Recompute, Tile
from zerograph.core.errors import ConfigError
from zerograph.core.executable import Executable
from zerograph.core.garbage import without_gc
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.param_bytes import state_bytes
from zerograph.core.plan import DEVICE, OFFLOADS, Homes, Offload, Overlap, Plan, Update, compute_dtype
from zerograph.core.step import Step, TokenRegion
from zerograph.planner.profile.liveness import Graph, Mode
from zerograph.planner.profile.loss import LOSS_TILES, Head, head_of, loss_tiles, tiled, with_loss_tiles
from zerograph.planner.profile.regions import Profile, profile
from zerograph.planner.profile.tiling import in_loops, looped, tiles_wanted
from zerograph.planner.profile.token_tiles import TOKEN_TILES, by_token, with_token_tiles
from zerograph.planner.programs.homes import open_homes, open_tiers
from zerograph.planner.programs.rates import Rates
from zerograph.planner.programs.rules import plan_step, recomputed_layers
from zerograph.planner.search import knobs
from zerograph.planner.search.deep_search import DeepSearch, Look
from zerograph.planner.search.few_layers import by_few_layers
from zerograph.planner.search.knobs import Knob, every, first, halfway, neighbours, spread
from zerograph.planner.search.peaks import with_lower_peaks
from zerograph.planner.search.selective import stops
from zerograph.planner.search.space import Candidate, Space, frontier, overrun, way_of
from zerograph.sim.simulate import on

MIB = 2**20
BUCKET_SIZES = (8 * MIB, 16 * MIB, DEFAULT_BUCKET_SIZE, 64 * MIB, 128 * MIB)
PREFETCHES = (0, DEFAULT_PREFETCH, 2, 4)
UNDER_WAY = (1, 2, 3, 4)
"""Reductions that may be under way at a time."""
FETCHES = (1, 2, 3, 4)
"""Layers before its own at which what a layer offloaded may begin to come back."""
MOST_TILES = 16
"""Tiles of one parameter, at most: each costs a collective of its own, and the planner a few tasks."""
ALL_TILES = 1024
"""Tiles of a step, at most, unless two of each parameter are more: a plan of so many takes the planner 0.1 s."""
HALVINGS = 3
"""Times that what lies between two neighbours of the frontier is halved."""
GROUPS = 4
"""Groups of items that a knob is turned for, beside all of them."""
FEW = 8
"""Buckets up to which items are turned one by one."""
LOWERED = 6
"""Plans whose peaks are lowered, of those that stay and of those that leave the device."""
COMPLETE = 1300
"""Plans up to which all are looked at, but for what only says when something begins."""
COARSE = 48
"""Plans that are looked at with knobs turned for all items at once, however deep the step: the rest follows from it."""
FIXED, FIXED_AWAY = 64, 32
"""Buckets up to which a search looks where one thing is fixed, too: of plans that stay on the device, and of all. It
then takes ten times as long, for 24 layers 0.3 and 6 CPU seconds."""
WORK = 60_000
"""About how many tasks are simulated of plans that stay on the device, and then of all, from the first plans on."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The arguments that the user fixed; None and "auto" leave the choice to the search.

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
        saved: where what repeated layers save waits for the backward; None leaves that open where something may leave.
        tile: whether large parameters may be tiled; None as ``offload`` has it.
        loss: tiles of the loss; "auto" looks at some, None too where ``tile`` does and the plan need not be
            executable.
        tokens: tiles of tokens in layers, all of which are then recomputed; "auto" looks at some, None at none.
        tiling: of which parameters the number of tiles is fixed, as in :class:`~zerograph.core.config.Config`.
        update: where states on the host are updated; on the device only what the host has can be.
        overlap: what updates of states off the device run beside, by the optimizer's argument of that name.
        executable: what the one who runs the plan can carry out, and nothing else is searched; None searches all.
    """

    stage: Literal[0, 1, 2, 3, "auto"]
    world_size: int
    bucket_size: int | None = None
    prefetch: int | None = None
    recompute: Recompute = "auto"
    offload: Offload | Literal["auto"] = "none"
    tier: Tier | None = None
    saved: Tier | None = None
    tile: bool | None = None
    loss: int | Literal["auto"] | None = None
    tokens: int | Literal["auto"] | None = None
    tiling: Tile = "auto"
    update: Update = "host"
    overlap: Overlap = "none"
    executable: Executable | None = None

    @classmethod
    def of(cls, config: Config, world_size: int, **fixed: Any) -> Wish:
        """The arguments that were given to ``config``; ``fixed`` are further fields, or other values of them."""
        given = {
            "bucket_size": config.bucket_size if "bucket_size" in config.given else None,
            "prefetch": config.prefetch if "prefetch" in config.given else None,
            "recompute": config.recomputed,
            "offload": config.offload,
            "tier": config.tier,
            "saved": None if config.activations == "auto" else config.saved,
            "loss": None if config.loss_tiles == "auto" else config.loss_tiles,
            "tokens": None if config.token_tiles == "auto" else config.token_tiles,
            "update": config.update,
            "tile": None if config.tile == "auto" else False,
            "tiling": config.tile,
        }
        return cls(config.stage, world_size, **given | fixed)

    @property
    def sharding(self) -> int:
        """The stage that says what is sharded."""
        return 3 if self.stage == "auto" else self.stage

    @property
    def tiles(self) -> bool:
        """Whether tilings are looked at: only what is gathered for each use can be tiled."""
        wanted = self.offload != "none" if self.tile is None else self.tile
        return wanted and self.sharding == 3

    @property
    def activations(self) -> bool:
        """Whether the search chooses which saved activations leave the device, where something may."""
        return self.saved is None and (self.executable is None or bool(self.executable.tiers))

    def tiers(self, machine: Machine) -> tuple[Tier, ...]:
        """Where something may go that leaves the device.

        Raises:
            ConfigError: offloading was asked for, and the machine has no such tier, or nobody carries it out there.
        """
        tier = "host" if self.update == "device" else self.tier
        found = open_tiers(machine, self.world_size, self.offload, tier)
        if self.executable is None or self.offload == "none":
            return found
        run = tuple(tier for tier in found if tier in self.executable.tiers)
        if not run:
            raise ConfigError(
                f"on {machine.name} nothing can leave the device yet", "offload runs on CPUs, with shards on NVMe"
            )
        return run


class Way(NamedTuple):
    """A step with its loss whole, or in tiles, each of which reads the parameters of ``head`` whole; and with tokens
    whole, or with all layers recomputed in tiles of them."""

    profile: Profile
    loss_tiles: int = 1
    head: Head | None = None
    token_tiles: int = 1


class Search:
    """Candidates for one step on one machine; ask :meth:`within` for the best of any budget."""

    def __init__(
        self,
        step: Step,
        wish: Wish,
        machine: Machine,
        *,
        states: int | None = None,
        moments: int = 2,
        work: int = WORK,
        thorough: bool = True,
        within: Search | None = None,
    ) -> None:
        """
        Args:
            states: bytes on the device between steps; default: shards and optimizer states of the step's parameters.
            moments: tensors that the optimizer keeps per parameter.
            work: about how many tasks are simulated of plans that offload or tile, twice as many where all do. The
                first plans and :data:`COARSE` others are looked at in any case.
            thorough: look where one thing is fixed, too, if nothing is.
            within: a search with more open, whose simulations this one takes.
        """
        self.wish, self.moments = wish, moments
        with without_gc():
            like = within if within is not None and _same_ways(wish, within.wish) else None
            self.ways: list[Way] = _ways(Graph.of(step), wish, machine) if like is None else like.ways
            self.states = sum(state_bytes(step.params, wish.world_size, moments)) if states is None else states
            self.tiers = wish.tiers(machine)
            self.homes = open_homes(wish.offload, self.tiers, wish.sharding)
            # The first way has the loss whole, or as it is fixed: what stays on the device is of that one, unless tiles
            # of the loss are all that is open.
            known = [] if like is None else like._every_space
            self.spaces, *parts = [
                list(_spaces(step, wish, machine, self.states, moments, way, known)) for way in self.ways
            ]
            spaces = [*self.spaces, *chain.from_iterable(parts)]
            self._every_space: list[Space] = spaces
            self._deep = self._deep_search(spaces)
            if self._deep is not None:
                return
            found = _Local()
            if DEVICE in self.homes:
                tiled = wish.loss is not None or wish.tokens is not None
                stay = spaces if tiled and not (self.tiers or wish.tiles) else self.spaces
                found.explore({space: _staying(space, wish) for space in stay}, WORK)
            if self.tiers or wish.tiles:
                open_knobs = {s: _all_knobs(s, wish, self.homes, self.tiers) for s in spaces}
                found.explore(open_knobs, work * (1 if DEVICE in self.homes else 2), groups=GROUPS, tile=wish.tiles)
            best = list(found.best)
            for one in self.with_one_fixed() if thorough else ():
                best += Search(step, one, machine, states=self.states, moments=moments, work=work, within=self).best
            self.best = frontier(best)

    def _deep_search(self, spaces: Sequence[Space]) -> DeepSearch | None:
        """The search of a step that is too deep for this one, where nothing is fixed."""
        looks = list(_fixed_once(self.wish, self.tiers))
        few = [space for space in map(by_few_layers, spaces if looks else ()) if space is not None]
        if not few or len(few) < len(spaces):
            return None
        return DeepSearch([_look(one, few, self.tiers) for one in (self.wish, *looks)])

    def with_one_fixed(self) -> Iterator[Wish]:
        """The wish with anything fixed, at what the search considers; none where something is, and of large steps."""
        wish = self.wish
        told = (wish.stage, wish.bucket_size, wish.prefetch, wish.recompute, wish.tier, wish.tile)
        if told != ("auto", None, None, "auto", None, None) or wish.offload not in ("none", "auto"):
            return
        sizes = [space.size for space in self.spaces if len(space.plan.buckets) <= FIXED]
        if not sizes:
            return
        if wish.offload == "auto" and len(self.spaces[-1].plan.buckets) > FIXED_AWAY:
            yield replace(wish, offload="none")  # which is looked at so
            return
        yield from (replace(wish, stage=stage) for stage in (1, 2, 3))
        yield from (replace(wish, prefetch=prefetch) for prefetch in PREFETCHES)
        yield from (replace(wish, recompute=recompute) for recompute in ("none", "full"))
        if len(self.spaces) > 1:
            yield from (replace(wish, bucket_size=size) for size in sizes)
        yield from (replace(wish, tier=tier) for tier in self.tiers)
        if self.tiers:
            yield from (replace(wish, offload=kind) for kind in OFFLOADS[1:])

    @cached_property
    def best(self) -> list[Candidate]:
        """The plans that no other beats, the smallest on the device first."""
        assert self._deep is not None
        return self._deep.settled()

    @property
    def smallest(self) -> Candidate:
        """The one that needs the least memory."""
        return self.best[0]

    def closest(self, budget: int | Mapping[Tier, int]) -> Candidate:
        """The one that overruns the tiers of ``budget`` by the smallest share."""
        most = limits(budget)
        return min(self.best, key=lambda c: (overrun(c.peaks, most)[0], c.rank))

    def within(self, budget: int | Mapping[Tier, int]) -> Candidate | None:
        """The fastest whose peaks are at most ``budget`` bytes; None when none is.

        Args:
            budget: per tier, none where one is missing; a number is the device's, and leaves the others unlimited.
        """
        most = limits(budget)
        if self._deep is not None:
            return self._deep.within(most)
        return min((c for c in self.best if c.fits(most)), key=lambda c: c.rank, default=None)


class _Local:
    """The local search: what it has found, and what it goes on from.

    Attributes:
        best: of all plans so far those that no other beats.
    """

    def __init__(self) -> None:
        self.best: list[Candidate] = []
        self._seen: set[Candidate] = set()
        self._beaten: deque[Candidate] = deque()

    def explore(
        self, knobs_of: Mapping[Space, Sequence[Knob]], work: int, *, groups: int = 0, tile: bool = False
    ) -> None:
        """Look at plans of these spaces, from the first ones on and from what is known of them.

        Args:
            groups: of items that knobs of deep steps are turned for, beside all of them; 0 for none.
            tile: whether operators may be tiled to lower a peak.
        """
        ways = set()
        for space, own in knobs_of.items():  # the smallest buckets of a way come first
            for plan in first(space.plan, own, least=way_of(space.plan) not in ways):
                self._add(space.of(plan))
            ways.add(way_of(space.plan))
        few = all(len(space.plan.buckets) <= FEW for space in knobs_of)
        coarse = {space: [knob for knob in own if not knob.fine] for space, own in knobs_of.items()}
        # Knobs are independent: the plans of a space are the product of all choices.
        complete = sum(prod(len(c) for k in own for c in k.choices.values()) for own in coarse.values()) <= COMPLETE
        for space, own in coarse.items() if complete else ():
            for plan in every(own, space.plan):
                self._add(space.of(plan))
        # Four ways of looking share the work: all items at once, halves of what differs, groups of items, lower peaks.
        self._turn(knobs_of, 1, work // 4)
        self._halve(knobs_of, work // 4)
        if few or groups:
            self._turn(coarse, sys.maxsize if few else groups, work // 4)
        for candidate in with_lower_peaks(spread(self._by_memory())[:LOWERED], tile=tile, work=work // 4):
            self._add(candidate)
        if few:
            self._turn(knobs_of, sys.maxsize, work // 4, beaten=not complete)

    def _by_memory(self) -> list[Candidate]:
        return sorted(self.best, key=lambda c: c.peaks)

    def _add(self, candidate: Candidate) -> None:
        # Candidates compare by identity, and a space makes one for each plan.
        if candidate in self._seen:
            return
        self._seen.add(candidate)
        better = next((other for other in self.best if other.beats(candidate)), None)
        if better is not None and (better.rank != candidate.rank or better.turned <= candidate.turned):
            self._beaten.append(candidate)
        else:
            best, self.best = self.best, [candidate]
            for other in best:
                # Kept all the same: a plan that is beaten may lead to one that is not.
                (self._beaten if candidate.beats(other) else self.best).append(other)

    def _turn(self, knobs_of: Mapping[Space, Sequence[Knob]], groups: int, work: int, *, beaten: bool = False) -> None:
        """Turn single knobs of the best plans, evenly spread over their memory, until that finds nothing better; then
        of those that were ``beaten``, which may lead on."""
        end, enough = work + _work(knobs_of), len(self._seen) + (COARSE if groups == 1 else 0)
        done: set[Candidate] = set()
        while True:
            fresh = [c for c in spread(self._by_memory()) if c not in done]
            if not fresh and beaten and self._beaten:
                fresh = [self._beaten.popleft()]
            if not fresh:
                return
            for candidate in fresh:
                done.add(candidate)
                if not beaten and candidate not in self.best:
                    continue  # something better was found meanwhile
                for plan in neighbours(knobs_of.get(candidate.space, ()), candidate.plan, groups):
                    self._add(candidate.space.of(plan))
                    if _work(knobs_of) >= end and len(self._seen) >= enough:
                        return

    def _halve(self, knobs_of: Mapping[Space, Sequence[Knob]], work: int) -> None:
        """Look between neighbours among the best plans of a space."""
        end = work + _work(knobs_of)
        for _ in range(HALVINGS):
            best = self._by_memory()
            for space, own in knobs_of.items():
                for a, b in pairwise(c for c in best if c.space is space):
                    self._add(space.of(halfway(own, a.plan, b.plan)))
                    if _work(knobs_of) >= end:
                        return


def _work(spaces: Iterable[Space]) -> int:
    return sum(space.work for space in spaces)


def _look(wish: Wish, few: Sequence[Space], tiers: Sequence[Tier]) -> Look:
    """The knobs that ``wish`` leaves open for plans that stay on the device, and for all."""
    tiers = () if wish.offload == "none" else tuple(tier for tier in tiers if wish.tier in (None, tier))
    homes = open_homes(wish.offload, tiers, wish.sharding)
    leaves = bool(tiers) or wish.tiles
    fixed = wish.loss not in (None, "auto") and wish.tokens != "auto"
    stay = [space for space in few if way_of(space.plan) == (1, 1) or not leaves or fixed]
    staying = {space: _staying(space, wish) for space in stay if DEVICE in homes}
    return staying, {space: _all_knobs(space, wish, homes, tiers) for space in few if leaves}


def _fixed_once(wish: Wish, tiers: Sequence[Tier]) -> Iterator[Wish]:
    """The wishes that ``wish`` becomes with one thing fixed; none where something is."""
    if (wish.stage, wish.prefetch, wish.recompute, wish.offload, wish.tier, wish.saved) == (
        *("auto", None, "auto", "auto", None, None),
    ):
        yield from (replace(wish, prefetch=prefetch) for prefetch in PREFETCHES)
        yield from (replace(wish, offload=kind) for kind in OFFLOADS[1:])
        yield from (replace(wish, tier=tier) for tier in tiers)
        yield replace(wish, recompute="full")
        yield replace(wish, stage=3)


def _same_ways(wish: Wish, other: Wish) -> bool:
    ours, theirs = ((one.recompute, one.tiles, one.bucket_size, one.saved, one.tokens) for one in (wish, other))
    return ours == theirs


def _staying(space: Space, wish: Wish) -> list[Knob]:
    """The knobs of plans that leave everything on the device."""
    profile, rates = space.scheduler.profile, space.scheduler.rates
    found = []
    if profile.training and wish.sharding == 3:
        found.append(_only(knobs.residency(space), "use" if wish.stage == 3 else None))
    if profile.training and wish.recompute in ("auto", "full") and profile.layers:
        full = wish.recompute == "full" or space.plan.token_tiles > 1
        found.append(_only(knobs.levels(space), 0 if full else None))
    prefetches = _prefetches(space, wish)
    found.append(knobs.prefetch(prefetches))
    if rates.overlaps and prefetches[-1]:
        found.append(knobs.starts(space, prefetches[-1]))
    if profile.training and rates.overlaps and wish.world_size > 1:
        found.append(knobs.of_step("reductions", UNDER_WAY))
    if profile.training and wish.saved not in (None, "device"):
        found.append(knobs.of_step("fetch_ahead", FETCHES))
    return found


def _only(knob: Knob, choice: object) -> Knob:
    """``knob`` with one choice, unless that is None."""
    return knob if choice is None else replace(knob, choices=dict.fromkeys(knob.choices, (choice,)))


def _all_knobs(space: Space, wish: Wish, homes: Sequence[Homes], tiers: Sequence[Tier]) -> list[Knob]:
    """The knobs where something may leave the device, or be tiled."""
    found = _staying(space, wish)
    if wish.tiles:
        found.append(knobs.tiles(space))
    if tiers and space.scheduler.profile.training:
        found.append(knobs.homes(space, homes))
        if wish.activations:
            found += (knobs.layers_away(space, tiers), knobs.activations_away(space, tiers))
            found.append(knobs.of_step("fetch_ahead", FETCHES))
    return found


def _prefetches(space: Space, wish: Wish) -> tuple[int, ...]:
    if wish.prefetch is not None:
        return (wish.prefetch,)
    return PREFETCHES if space.scheduler.profile.training and space.plan.buckets else (DEFAULT_PREFETCH,)


def smallest(
    step: Step, wish: Wish, machine: Machine, states: int, moments: int, known: Sequence[Way] = ()
) -> list[Candidate]:
    """Those plans of a :class:`Search` that need the least of each tier, at a small part of its cost.

    Args:
        known: the step's ways, where there are some already.
    """
    # The smallest buckets need the least: fewer bytes are whole at a time.
    wish = replace(wish, bucket_size=BUCKET_SIZES[0] if wish.bucket_size is None else wish.bucket_size)
    tiers = wish.tiers(machine)
    homes = open_homes(wish.offload, tiers, wish.sharding)
    with without_gc():
        return [
            space.of(plan)
            for way in known or _ways(Graph.of(step), wish, machine)
            for space in _spaces(step, wish, machine, states, moments, way)
            for plan in first(space.plan, _all_knobs(space, wish, homes, tiers), least=True)
        ]


def _ways(graph: Graph, wish: Wish, machine: Machine) -> list[Way]:
    """The step with its loss whole and, where tiles are open, in each number of tiles.

    Each has the levels between nothing and all saved where the search may choose them. Those are of layers, which the
    tiles of the loss do not touch.
    """
    graph = _in_loops(graph, wish)
    base: Mode = "none" if wish.recompute == "none" else "auto"
    spared = {}
    if wish.recompute == "auto" and graph.step.training:
        spared = stops(graph, Rates(machine, wish.world_size, compute_dtype(graph.step.params)))
    # Who runs the plan asks for tiles of the loss, and of tokens, where nothing fits without.
    looks = wish.tiles and wish.executable is None if wish.loss is None else wish.loss != 1
    head = head_of(graph) if looks else None
    losses = (1, *_loss_tiles(wish, head)) if head is not None else (1,)
    if isinstance(wish.loss, int):
        losses = losses[-1:]
    regions = _regions(graph.step, wish) if wish.tokens not in (None, 1) else []
    tokens: tuple[int, ...] = (1,)
    if regions:
        tokens = (wish.tokens,) if isinstance(wish.tokens, int) else (1, *TOKEN_TILES)
    found = []
    for number in tokens:
        step = by_token(graph.step, regions, number) if number > 1 else graph.step
        for tiles in losses:
            here = tiled(step, head, tiles) if head is not None and tiles > 1 else step
            profiled = profile(graph if here is graph.step else here, base, spared)
            found.append(Way(profiled, tiles, head if tiles > 1 else None, number))
    return found


def _loss_tiles(wish: Wish, head: Head) -> tuple[int, ...]:
    if isinstance(wish.loss, int):
        return (wish.loss,)
    return loss_tiles(head, wish.bucket_size or DEFAULT_BUCKET_SIZE) if wish.loss is None else LOSS_TILES


def _regions(step: Step, wish: Wish) -> list[TokenRegion]:
    """The regions in tiles of tokens where any is: in layers that are recomputed, with weights that are whole."""
    layers = recomputed_layers(step, "full" if wish.recompute == "auto" else wish.recompute)
    tiled = tiles_wanted(wish.tiling, step, wish.world_size, wish.bucket_size or DEFAULT_BUCKET_SIZE)
    return [r for r in step.token_regions if r.layer in layers and tiled.keys().isdisjoint(r.params)]


def _in_loops(graph: Graph, wish: Wish) -> Graph:
    """The step with the MLPs in loops whose tiles the user fixed. Where something may leave the device it is not known
    which of them are, and where tiles are searched they take no more than what is counted for weights in tiles."""
    if wish.offload != "none" or not isinstance(wish.tiling, tuple) or not graph.step.mlps:
        return graph
    step, size = graph.step, wish.bucket_size or DEFAULT_BUCKET_SIZE
    tiles = tiles_wanted(wish.tiling, step, wish.world_size, size)
    plan = plan_step(
        step, stage=wish.sharding, world_size=wish.world_size, bucket_size=size, prefetch=DEFAULT_PREFETCH, tiles=tiles
    )
    return Graph(looped(step, in_loops(plan, step)))


def limits(budget: int | Mapping[Tier, int]) -> tuple[int, ...]:
    """Bytes that each of :data:`~zerograph.core.machine.TIERS` may hold."""
    if isinstance(budget, int):
        return (budget, *(sys.maxsize for _ in TIERS[1:]))
    return tuple(budget.get(tier, 0) for tier in TIERS)


def _spaces(
    step: Step,
    wish: Wish,
    machine: Machine,
    states: int,
    moments: int,
    way: Way,
    known: Sequence[Space] = (),
) -> Iterator[Space]:
    """One per distinct way to put parameters into buckets; of the same step and machine others may be ``known``."""
    seen = set()
    for size in BUCKET_SIZES if wish.bucket_size is None else (wish.bucket_size,):
        plan = plan_step(
            step,
            stage=wish.sharding,
            world_size=wish.world_size,
            bucket_size=size,
            prefetch=DEFAULT_PREFETCH if wish.prefetch is None else wish.prefetch,
            recompute="full" if way.token_tiles > 1 and wish.recompute == "auto" else wish.recompute,
            saved=wish.saved or "device",
            update=wish.update,
            overlap=wish.overlap,
            tiles=tiles_wanted(wish.tiling, step, wish.world_size, size),
        )
        whole: tuple[str, ...] = ()
        if way.head is not None:
            plan, whole = with_loss_tiles(plan, way.head, way.loss_tiles), way.head.params
        if way.token_tiles > 1:
            plan = with_token_tiles(plan, step, way.token_tiles)
            whole += tuple(name for region in step.token_regions for name in region.params)
        # A model smaller than a bucket gets the same buckets for several sizes.
        if plan not in seen:
            seen.add(plan)
            rates = Rates(machine, wish.world_size, plan.compute_dtype)
            most = most_tiles(plan, size, whole) if wish.tiles else ()
            if step.tilable is not None and wish.tiles:
                most = tuple(n if plan.buckets[i].params[0].name in step.tilable else 1 for i, n in enumerate(most))
            held = on("device", states)
            params = [bucket.params for bucket in plan.buckets]
            alike = (s for s in known if s.scheduler.profile is way.profile)
            like = next((s for s in alike if [bucket.params for bucket in s.plan.buckets] == params), None)
            yield Space(way.profile, plan, rates, held, moments=moments, most_tiles=most, size=size, like=like)


def most_tiles(plan: Plan, size: int, whole: Container[str] = ()) -> tuple[int, ...]:
    """In how many tiles each bucket may be: 1 unless it is one parameter that is larger than ``size`` when gathered,
    and none of those that have to be ``whole``."""
    alone = (b for b in plan.buckets if len(b.params) == 1 and b.params[0].sharded and b.params[0].name not in whole)
    large = {b.index for b in alone if b.gathered_bytes > size}
    most = min(MOST_TILES, max(2, ALL_TILES // max(1, len(large))))
    return tuple(min(most, b.params[0].chunk(plan.world_size)) if b.index in large else 1 for b in plan.buckets)
