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

The loss, and then layers, are in tiles only where nothing fits a budget without (:func:`search_within`).

No budget enters, so more of one never finds a slower plan. Plans that stay on the device are searched as where nothing
can leave it, and then the rest from there: another tier never makes a plan slower either. All ranks that are given the
same step, machine and budget find the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from zerograph.core.garbage import without_gc
from zerograph.core.machine import Machine, Tier
from zerograph.core.param_bytes import state_bytes
from zerograph.core.plan import DEVICE, OFFLOADS
from zerograph.core.step import Step
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import head_of
from zerograph.planner.profile.token_tiles import regions_of
from zerograph.planner.search.constraints import PREFETCHES, Constraints
from zerograph.planner.search.decisions import all_decisions, staying
from zerograph.planner.search.deep_search import LEAVING, LEAVING_LARGE, DeepSearch, Look
from zerograph.planner.search.few_layers import FewLayers, by_few_layers
from zerograph.planner.search.local_search import GROUPS, WORK, LocalSearch
from zerograph.planner.search.search_space import Candidate, SearchSpace, frontier, limits, overrun, variant_of
from zerograph.planner.search.variants import Variant, same_variants, spaces_of, variants_of

FIXED, FIXED_AWAY = 64, 32
"""Buckets up to which a search looks where one thing is fixed, too: of plans that stay on the device, and of all. It
then takes ten times as long, for 24 layers 0.3 and 6 CPU seconds."""
LARGE = 512
"""Buckets from which on a deep step is looked at with everything open and with all parameters off the device, and not
with other things fixed: that leaves the fewest placements of all, so a local search finds most there. Both look at
twice as many plans; every other look at 128 layers would take a CPU second."""


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
                first plans and :data:`~zerograph.planner.search.local_search.COARSE` others are looked at in any case.
            thorough: look where one thing is fixed, too, if nothing is.
            within: a search with more open, whose simulations this one takes.
        """
        self.constraints, self.moments = constraints, moments
        step = step.over(constraints.world_size)
        self.variants: list[Variant]
        self.spaces: list[SearchSpace]
        self.states: int
        self._parts: list[Search] = []  # one for each place of updates, where that is open
        if "auto" in (constraints.overlap, constraints.update):
            for one in constraints.with_updates(machine):
                like = self._parts[0] if self._parts else None
                self._parts.append(
                    Search(
                        step, one, machine, states=states, moments=moments, work=work, thorough=thorough, within=like
                    )
                )
            first_part = self._parts[0]
            self.variants, self.spaces, self.states = first_part.variants, first_part.spaces, first_part.states
            return
        with without_gc():
            like = within if within is not None and same_variants(constraints, within.constraints) else None
            self.variants = variants_of(Graph.of(step), constraints, machine) if like is None else like.variants
            self.states = sum(state_bytes(step.params, moments)) if states is None else states
            self.tiers = constraints.tiers(machine)
            self.placements = constraints.placements(self.tiers)
            # The first variant has the loss whole, or as it is fixed: what stays on the device is of that one, unless
            # tiles of the loss are all that is open.
            known = [] if like is None else like._every_space
            spaces: list[SearchSpace] = []
            for variant in self.variants:
                spaces += list(spaces_of(step, constraints, machine, self.states, moments, variant, known, spaces))
            self.spaces = [space for space in spaces if space.scheduler.profile is self.variants[0].profile]
            self._every_space: list[SearchSpace] = spaces
            self._deep = self._deep_search(spaces)
            if self._deep is not None:
                return
            found = LocalSearch()
            if DEVICE in self.placements:
                tiled = constraints.loss is not None or constraints.tokens is not None
                stay = spaces if tiled and not (self.tiers or constraints.tiles) else self.spaces
                found.explore({space: staying(space, constraints) for space in stay}, WORK)
            if self.tiers or constraints.tiles:
                open_decisions = {s: all_decisions(s, constraints, self.placements, self.tiers) for s in spaces}
                found.explore(
                    open_decisions,
                    work * (1 if DEVICE in self.placements else 2),
                    groups=GROUPS,
                    tile=constraints.tiles,
                )
            best = list(found.best)
            for one in self.with_one_fixed() if thorough else ():
                best += Search(step, one, machine, states=self.states, moments=moments, work=work, within=self).best
            self.best = frontier(best)

    def _deep_search(self, spaces: Sequence[SearchSpace]) -> DeepSearch | None:
        """The search of a step that is too deep for this one, where nothing is fixed."""
        looks = list(_fixed_once(self.constraints, self.tiers))
        leaving = LEAVING
        if looks and len(self.spaces[-1].plan.buckets) > LARGE:
            looks, leaving = [one for one in looks if one.offload == "parameters"], LEAVING_LARGE
        few: list[FewLayers] = []
        for space in spaces:
            found = by_few_layers(space, few) if looks else None
            if found is None:
                return None
            few.append(found)
        return DeepSearch([_look(one, few, self.tiers) for one in (self.constraints, *looks)], leaving)

    def with_one_fixed(self) -> Iterator[Constraints]:
        """The constraints with one thing more fixed, at what the search considers; none of large steps."""
        constraints = self.constraints
        given = (
            constraints.stage,
            constraints.bucket_size,
            constraints.prefetch,
            constraints.recompute,
            constraints.tier,
            constraints.tile,
        )
        if given != ("auto", None, None, "auto", None, None) or constraints.offload not in ("none", "auto"):
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
        if self._parts:
            return frontier(chain.from_iterable(part.best for part in self._parts))
        assert self._deep is not None
        with without_gc():
            return self._deep.best()

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
        if self._parts:
            found = [fastest for part in self._parts if (fastest := part.within(budget)) is not None]
        elif self._deep is not None:
            with without_gc():
                return self._deep.within(most)
        else:
            found = [c for c in self.best if c.fits(most)]
        return min(found, key=lambda c: c.rank, default=None)


def _look(constraints: Constraints, few: Sequence[SearchSpace], tiers: Sequence[Tier]) -> Look:
    """The decisions that ``constraints`` leave open for plans that stay on the device, and for all."""
    tiers = () if constraints.offload == "none" else tuple(tier for tier in tiers if constraints.tier in (None, tier))
    placements = constraints.placements(tiers)
    leaves = bool(tiers) or constraints.tiles
    fixed = constraints.loss not in (None, "auto") and constraints.tokens != "auto"
    stay = [space for space in few if variant_of(space.plan) == (1, 1, False) or not leaves or fixed]
    stays = {space: staying(space, constraints) for space in stay if DEVICE in placements}
    return stays, {space: all_decisions(space, constraints, placements, tiers) for space in few if leaves}


def _fixed_once(constraints: Constraints, tiers: Sequence[Tier]) -> Iterator[Constraints]:
    """``constraints`` with one thing fixed; none where something is."""
    given = (
        constraints.stage,
        constraints.prefetch,
        constraints.recompute,
        constraints.offload,
        constraints.tier,
        constraints.saved,
    )
    if given == ("auto", None, "auto", "auto", None, None):
        yield from (replace(constraints, prefetch=prefetch) for prefetch in PREFETCHES)
        yield from (replace(constraints, offload=kind) for kind in OFFLOADS[1:])
        yield from (replace(constraints, tier=tier) for tier in tiers)
        yield replace(constraints, recompute="full")
        yield replace(constraints, stage=3)


def search_within(
    step: Step,
    constraints: Constraints,
    machine: Machine,
    budget: int | Mapping[Tier, int],
    *,
    states: int | None = None,
    moments: int = 2,
) -> tuple[Search, Candidate | None]:
    """The first search that finds a plan within ``budget``, with that plan; else the widest one, and None.

    Args:
        states, moments: as for :class:`Search`.
    """
    for wider in _wider(step, constraints):
        search = Search(step, wider, machine, states=states, moments=moments)
        found = search.within(budget)
        if found is not None:
            break
    return search, found


def _wider(step: Step, constraints: Constraints) -> Iterator[Constraints]:
    """``constraints``, and then with more in tiles each time."""
    yield constraints
    if constraints.loss is None and head_of(Graph.of(step)) is not None:
        # Tiles read the head's weight again and again.
        constraints = replace(constraints, loss="auto")
        yield constraints
    tiles = constraints.recompute in ("auto", "full") or regions_of(step, by_sample=True)
    if constraints.tokens is None and step.token_regions and tiles:
        # They round sums over tokens otherwise than a step in one piece, and of tokens recompute all layers.
        yield replace(constraints, tokens="auto")
