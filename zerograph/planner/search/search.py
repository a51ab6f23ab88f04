"""The plan with the least predicted step time that fits a memory budget.

One local search over all that is free (Pareto local search; Paquete et al. 2004). It begins with the plan that the
rules make, and with those that need the least of each tier, in buckets of each size. From plans that no other beats in
both time and the memory of every tier it changes one decision at a time (:mod:`~zerograph.planner.search.decisions`):
for all items, then, between two neighbours, for half of what tells them apart, those first that save the most seconds
per byte, then for fewer items. In small steps it looks at every plan, but for those that differ only in when something
begins. Where a plan has its peak, gathers wait and operators are tiled (:mod:`~zerograph.planner.search.peaks`). Every
plan is simulated.

A local search may miss what it finds with less to change. Where nothing is fixed it therefore also looks as if one
thing were, so that fixing one never helps; in large steps at fewer things.

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
from zerograph.planner.search import decisions
from zerograph.planner.search.decisions import Decision, every, first, halfway, neighbours, spread
from zerograph.planner.search.deep_search import DeepSearch, Look
from zerograph.planner.search.few_layers import by_few_layers
from zerograph.planner.search.peaks import with_lower_peaks
from zerograph.planner.search.search_space import Candidate, SearchSpace, frontier, overrun, variant_of
from zerograph.planner.search.selective import stops
from zerograph.sim.costs import on

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
"""Groups of items that a decision is changed for, beside all of them."""
FEW = 8
"""Buckets up to which items are changed one by one."""
LOWERED = 6
"""Plans whose peaks are lowered, of those that stay and of those that leave the device."""
COMPLETE = 1300
"""Plans up to which all are looked at, but for what only says when something begins."""
COARSE = 48
"""Plans that are looked at with decisions changed for all items at once, however deep the step; the rest follows."""
FIXED, FIXED_AWAY = 64, 32
"""Buckets up to which a search looks where one thing is fixed, too: of plans that stay on the device, and of all. It
then takes ten times as long, for 24 layers 0.3 and 6 CPU seconds."""
WORK = 60_000
"""About how many tasks are simulated of plans that stay on the device, and then of all, from the first plans on."""


@dataclass(frozen=True, slots=True)
class Constraints:
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
    def of(cls, config: Config, world_size: int, **fixed: Any) -> Constraints:
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


class Variant(NamedTuple):
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
        constraints: Constraints,
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
        self.constraints, self.moments = constraints, moments
        with without_gc():
            like = within if within is not None and _same_variants(constraints, within.constraints) else None
            self.variants: list[Variant] = (
                _variants(Graph.of(step), constraints, machine) if like is None else like.variants
            )
            self.states = sum(state_bytes(step.params, constraints.world_size, moments)) if states is None else states
            self.tiers = constraints.tiers(machine)
            self.homes = open_homes(constraints.offload, self.tiers, constraints.sharding)
            # The first variant has the loss whole, or as it is fixed: what stays on the device is of that one, unless
            # tiles of the loss are all that is open.
            known = [] if like is None else like._every_space
            self.spaces, *parts = [
                list(_spaces(step, constraints, machine, self.states, moments, variant, known))
                for variant in self.variants
            ]
            spaces = [*self.spaces, *chain.from_iterable(parts)]
            self._every_space: list[SearchSpace] = spaces
            self._deep = self._deep_search(spaces)
            if self._deep is not None:
                return
            found = _Local()
            if DEVICE in self.homes:
                tiled = constraints.loss is not None or constraints.tokens is not None
                stay = spaces if tiled and not (self.tiers or constraints.tiles) else self.spaces
                found.explore({space: _staying(space, constraints) for space in stay}, WORK)
            if self.tiers or constraints.tiles:
                open_decisions = {s: _all_decisions(s, constraints, self.homes, self.tiers) for s in spaces}
                found.explore(
                    open_decisions, work * (1 if DEVICE in self.homes else 2), groups=GROUPS, tile=constraints.tiles
                )
            best = list(found.best)
            for one in self.with_one_fixed() if thorough else ():
                best += Search(step, one, machine, states=self.states, moments=moments, work=work, within=self).best
            self.best = frontier(best)

    def _deep_search(self, spaces: Sequence[SearchSpace]) -> DeepSearch | None:
        """The search of a step that is too deep for this one, where nothing is fixed."""
        looks = list(_fixed_once(self.constraints, self.tiers))
        few = [space for space in map(by_few_layers, spaces if looks else ()) if space is not None]
        if not few or len(few) < len(spaces):
            return None
        return DeepSearch([_look(one, few, self.tiers) for one in (self.constraints, *looks)])

    def with_one_fixed(self) -> Iterator[Constraints]:
        """The constraints with one thing more fixed, at what the search considers; none of large steps."""
        constraints = self.constraints
        told = (
            constraints.stage,
            constraints.bucket_size,
            constraints.prefetch,
            constraints.recompute,
            constraints.tier,
            constraints.tile,
        )
        if told != ("auto", None, None, "auto", None, None) or constraints.offload not in ("none", "auto"):
            return
        sizes = [space.size for space in self.spaces if len(space.plan.buckets) <= FIXED]
        if not sizes:
            return
        if constraints.offload == "auto" and len(self.spaces[-1].plan.buckets) > FIXED_AWAY:
            yield replace(constraints, offload="none")  # which is looked at so
            return
        yield from (replace(constraints, stage=stage) for stage in (1, 2, 3))
        yield from (replace(constraints, prefetch=prefetch) for prefetch in PREFETCHES)
        yield from (replace(constraints, recompute=recompute) for recompute in ("none", "full"))
        if len(self.spaces) > 1:
            yield from (replace(constraints, bucket_size=size) for size in sizes)
        yield from (replace(constraints, tier=tier) for tier in self.tiers)
        if self.tiers:
            yield from (replace(constraints, offload=kind) for kind in OFFLOADS[1:])

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
        self, decisions_of: Mapping[SearchSpace, Sequence[Decision]], work: int, *, groups: int = 0, tile: bool = False
    ) -> None:
        """Look at plans of these spaces, from the first ones on and from what is known of them.

        Args:
            groups: of items that decisions of deep steps are changed for, beside all of them; 0 for none.
            tile: whether operators may be tiled to lower a peak.
        """
        variants = set()
        for space, own in decisions_of.items():  # the smallest buckets of a variant come first
            for plan in first(space.plan, own, least=variant_of(space.plan) not in variants):
                self._add(space.of(plan))
            variants.add(variant_of(space.plan))
        few = all(len(space.plan.buckets) <= FEW for space in decisions_of)
        coarse = {space: [decision for decision in own if not decision.fine] for space, own in decisions_of.items()}
        # Decisions are independent: the plans of a space are the product of all choices.
        complete = sum(prod(len(c) for k in own for c in k.choices.values()) for own in coarse.values()) <= COMPLETE
        for space, own in coarse.items() if complete else ():
            for plan in every(own, space.plan):
                self._add(space.of(plan))
        # Four ways of looking share the work: all items at once, halves of what differs, groups of items, lower peaks.
        self._change(decisions_of, 1, work // 4)
        self._halve(decisions_of, work // 4)
        if few or groups:
            self._change(coarse, sys.maxsize if few else groups, work // 4)
        for candidate in with_lower_peaks(spread(self._by_memory())[:LOWERED], tile=tile, work=work // 4):
            self._add(candidate)
        if few:
            self._change(decisions_of, sys.maxsize, work // 4, beaten=not complete)

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

    def _change(
        self, decisions_of: Mapping[SearchSpace, Sequence[Decision]], groups: int, work: int, *, beaten: bool = False
    ) -> None:
        """Change single decisions of the best plans, evenly spread over their memory, until that finds nothing better;
        then of those that were ``beaten``, which may lead on."""
        end, enough = work + _work(decisions_of), len(self._seen) + (COARSE if groups == 1 else 0)
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
                for plan in neighbours(decisions_of.get(candidate.space, ()), candidate.plan, groups):
                    self._add(candidate.space.of(plan))
                    if _work(decisions_of) >= end and len(self._seen) >= enough:
                        return

    def _halve(self, decisions_of: Mapping[SearchSpace, Sequence[Decision]], work: int) -> None:
        """Look between neighbours among the best plans of a space."""
        end = work + _work(decisions_of)
        for _ in range(HALVINGS):
            best = self._by_memory()
            for space, own in decisions_of.items():
                for a, b in pairwise(c for c in best if c.space is space):
                    self._add(space.of(halfway(own, a.plan, b.plan)))
                    if _work(decisions_of) >= end:
                        return


def _work(spaces: Iterable[SearchSpace]) -> int:
    return sum(space.work for space in spaces)


def _look(constraints: Constraints, few: Sequence[SearchSpace], tiers: Sequence[Tier]) -> Look:
    """The decisions that ``constraints`` leave open for plans that stay on the device, and for all."""
    tiers = () if constraints.offload == "none" else tuple(tier for tier in tiers if constraints.tier in (None, tier))
    homes = open_homes(constraints.offload, tiers, constraints.sharding)
    leaves = bool(tiers) or constraints.tiles
    fixed = constraints.loss not in (None, "auto") and constraints.tokens != "auto"
    stay = [space for space in few if variant_of(space.plan) == (1, 1) or not leaves or fixed]
    staying = {space: _staying(space, constraints) for space in stay if DEVICE in homes}
    return staying, {space: _all_decisions(space, constraints, homes, tiers) for space in few if leaves}


def _fixed_once(constraints: Constraints, tiers: Sequence[Tier]) -> Iterator[Constraints]:
    """``constraints`` with one thing fixed; none where something is."""
    if (
        constraints.stage,
        constraints.prefetch,
        constraints.recompute,
        constraints.offload,
        constraints.tier,
        constraints.saved,
    ) == (*("auto", None, "auto", "auto", None, None),):
        yield from (replace(constraints, prefetch=prefetch) for prefetch in PREFETCHES)
        yield from (replace(constraints, offload=kind) for kind in OFFLOADS[1:])
        yield from (replace(constraints, tier=tier) for tier in tiers)
        yield replace(constraints, recompute="full")
        yield replace(constraints, stage=3)


def _same_variants(constraints: Constraints, other: Constraints) -> bool:
    ours, theirs = ((one.recompute, one.tiles, one.bucket_size, one.saved, one.tokens) for one in (constraints, other))
    return ours == theirs


def _staying(space: SearchSpace, constraints: Constraints) -> list[Decision]:
    """The decisions of plans that leave everything on the device."""
    profile, rates = space.scheduler.profile, space.scheduler.rates
    found = []
    if profile.training and constraints.sharding == 3:
        found.append(_only(decisions.residency(space), "use" if constraints.stage == 3 else None))
    if profile.training and constraints.recompute in ("auto", "full") and profile.layers:
        full = constraints.recompute == "full" or space.plan.token_tiles > 1
        found.append(_only(decisions.levels(space), 0 if full else None))
    prefetches = _prefetches(space, constraints)
    found.append(decisions.prefetch(prefetches))
    if rates.overlaps and prefetches[-1]:
        found.append(decisions.starts(space, prefetches[-1]))
    if profile.training and rates.overlaps and constraints.world_size > 1:
        found.append(decisions.of_step("reductions", UNDER_WAY))
    if profile.training and constraints.saved not in (None, "device"):
        found.append(decisions.of_step("fetch_ahead", FETCHES))
    return found


def _only(decision: Decision, choice: object) -> Decision:
    """``decision`` with one choice, unless that is None."""
    return decision if choice is None else replace(decision, choices=dict.fromkeys(decision.choices, (choice,)))


def _all_decisions(
    space: SearchSpace, constraints: Constraints, homes: Sequence[Homes], tiers: Sequence[Tier]
) -> list[Decision]:
    """The decisions where something may leave the device, or be tiled."""
    found = _staying(space, constraints)
    if constraints.tiles:
        found.append(decisions.tiles(space))
    if tiers and space.scheduler.profile.training:
        found.append(decisions.homes(space, homes))
        if constraints.activations:
            found += (decisions.layers_away(space, tiers), decisions.activations_away(space, tiers))
            found.append(decisions.of_step("fetch_ahead", FETCHES))
    return found


def _prefetches(space: SearchSpace, constraints: Constraints) -> tuple[int, ...]:
    if constraints.prefetch is not None:
        return (constraints.prefetch,)
    return PREFETCHES if space.scheduler.profile.training and space.plan.buckets else (DEFAULT_PREFETCH,)


def smallest(
    step: Step, constraints: Constraints, machine: Machine, states: int, moments: int, known: Sequence[Variant] = ()
) -> list[Candidate]:
    """Those plans of a :class:`Search` that need the least of each tier, at a small part of its cost.

    Args:
        known: the step's variants, where there are some already.
    """
    # The smallest buckets need the least: fewer bytes are whole at a time.
    constraints = replace(
        constraints, bucket_size=BUCKET_SIZES[0] if constraints.bucket_size is None else constraints.bucket_size
    )
    tiers = constraints.tiers(machine)
    homes = open_homes(constraints.offload, tiers, constraints.sharding)
    with without_gc():
        return [
            space.of(plan)
            for variant in known or _variants(Graph.of(step), constraints, machine)
            for space in _spaces(step, constraints, machine, states, moments, variant)
            for plan in first(space.plan, _all_decisions(space, constraints, homes, tiers), least=True)
        ]


def _variants(graph: Graph, constraints: Constraints, machine: Machine) -> list[Variant]:
    """The step with its loss whole and, where tiles are open, in each number of tiles.

    Each has the levels between nothing and all saved where the search may choose them. Those are of layers, which the
    tiles of the loss do not touch.
    """
    graph = _in_loops(graph, constraints)
    base: Mode = "none" if constraints.recompute == "none" else "auto"
    spared = {}
    if constraints.recompute == "auto" and graph.step.training:
        spared = stops(graph, Rates(machine, constraints.world_size, compute_dtype(graph.step.params)))
    # Who runs the plan asks for tiles of the loss, and of tokens, where nothing fits without.
    looks = constraints.tiles and constraints.executable is None if constraints.loss is None else constraints.loss != 1
    head = head_of(graph) if looks else None
    losses = (1, *_loss_tiles(constraints, head)) if head is not None else (1,)
    if isinstance(constraints.loss, int):
        losses = losses[-1:]
    regions = _regions(graph.step, constraints) if constraints.tokens not in (None, 1) else []
    tokens: tuple[int, ...] = (1,)
    if regions:
        tokens = (constraints.tokens,) if isinstance(constraints.tokens, int) else (1, *TOKEN_TILES)
    found = []
    for number in tokens:
        step = by_token(graph.step, regions, number) if number > 1 else graph.step
        for tiles in losses:
            here = tiled(step, head, tiles) if head is not None and tiles > 1 else step
            profiled = profile(graph if here is graph.step else here, base, spared)
            found.append(Variant(profiled, tiles, head if tiles > 1 else None, number))
    return found


def _loss_tiles(constraints: Constraints, head: Head) -> tuple[int, ...]:
    if isinstance(constraints.loss, int):
        return (constraints.loss,)
    return loss_tiles(head, constraints.bucket_size or DEFAULT_BUCKET_SIZE) if constraints.loss is None else LOSS_TILES


def _regions(step: Step, constraints: Constraints) -> list[TokenRegion]:
    """The regions in tiles of tokens where any is: in layers that are recomputed, with weights that are whole."""
    layers = recomputed_layers(step, "full" if constraints.recompute == "auto" else constraints.recompute)
    tiled = tiles_wanted(
        constraints.tiling, step, constraints.world_size, constraints.bucket_size or DEFAULT_BUCKET_SIZE
    )
    return [r for r in step.token_regions if r.layer in layers and tiled.keys().isdisjoint(r.params)]


def _in_loops(graph: Graph, constraints: Constraints) -> Graph:
    """The step with the MLPs in loops whose tiles the user fixed. Where something may leave the device it is not known
    which of them are, and where tiles are searched they take no more than what is counted for weights in tiles."""
    if constraints.offload != "none" or not isinstance(constraints.tiling, tuple) or not graph.step.mlps:
        return graph
    step, size = graph.step, constraints.bucket_size or DEFAULT_BUCKET_SIZE
    tiles = tiles_wanted(constraints.tiling, step, constraints.world_size, size)
    plan = plan_step(
        step,
        stage=constraints.sharding,
        world_size=constraints.world_size,
        bucket_size=size,
        prefetch=DEFAULT_PREFETCH,
        tiles=tiles,
    )
    return Graph(looped(step, in_loops(plan, step)))


def limits(budget: int | Mapping[Tier, int]) -> tuple[int, ...]:
    """Bytes that each of :data:`~zerograph.core.machine.TIERS` may hold."""
    if isinstance(budget, int):
        return (budget, *(sys.maxsize for _ in TIERS[1:]))
    return tuple(budget.get(tier, 0) for tier in TIERS)


def _spaces(
    step: Step,
    constraints: Constraints,
    machine: Machine,
    states: int,
    moments: int,
    variant: Variant,
    known: Sequence[SearchSpace] = (),
) -> Iterator[SearchSpace]:
    """One per distinct way to put parameters into buckets; of the same step and machine others may be ``known``."""
    seen = set()
    for size in BUCKET_SIZES if constraints.bucket_size is None else (constraints.bucket_size,):
        plan = plan_step(
            step,
            stage=constraints.sharding,
            world_size=constraints.world_size,
            bucket_size=size,
            prefetch=DEFAULT_PREFETCH if constraints.prefetch is None else constraints.prefetch,
            recompute="full" if variant.token_tiles > 1 and constraints.recompute == "auto" else constraints.recompute,
            saved=constraints.saved or "device",
            update=constraints.update,
            overlap=constraints.overlap,
            tiles=tiles_wanted(constraints.tiling, step, constraints.world_size, size),
        )
        whole: tuple[str, ...] = ()
        if variant.head is not None:
            plan, whole = with_loss_tiles(plan, variant.head, variant.loss_tiles), variant.head.params
        if variant.token_tiles > 1:
            plan = with_token_tiles(plan, step, variant.token_tiles)
            whole += tuple(name for region in step.token_regions for name in region.params)
        # A model smaller than a bucket gets the same buckets for several sizes.
        if plan not in seen:
            seen.add(plan)
            rates = Rates(machine, constraints.world_size, plan.compute_dtype)
            most = most_tiles(plan, size, whole) if constraints.tiles else ()
            if step.tilable is not None and constraints.tiles:
                most = tuple(n if plan.buckets[i].params[0].name in step.tilable else 1 for i, n in enumerate(most))
            held = on("device", states)
            params = [bucket.params for bucket in plan.buckets]
            alike = (s for s in known if s.scheduler.profile is variant.profile)
            like = next((s for s in alike if [bucket.params for bucket in s.plan.buckets] == params), None)
            yield SearchSpace(
                variant.profile, plan, rates, held, moments=moments, most_tiles=most, size=size, like=like
            )


def most_tiles(plan: Plan, size: int, whole: Container[str] = ()) -> tuple[int, ...]:
    """In how many tiles each bucket may be: 1 unless it is one parameter that is larger than ``size`` when gathered,
    and none of those that have to be ``whole``."""
    alone = (b for b in plan.buckets if len(b.params) == 1 and b.params[0].sharded and b.params[0].name not in whole)
    large = {b.index for b in alone if b.gathered_bytes > size}
    most = min(MOST_TILES, max(2, ALL_TILES // max(1, len(large))))
    return tuple(min(most, b.params[0].chunk(plan.world_size)) if b.index in large else 1 for b in plan.buckets)
