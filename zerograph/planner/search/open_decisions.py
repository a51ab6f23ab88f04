"""The decisions that constraints leave open in a space of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerograph.core.config import DEFAULT_PREFETCH
from zerograph.core.machine import Tier
from zerograph.core.plan import Placement
from zerograph.planner.search import decisions
from zerograph.planner.search.constraints import PREFETCHES, Constraints
from zerograph.planner.search.decisions import Decision
from zerograph.planner.search.search_space import SearchSpace

UNDER_WAY = (1, 2, 3, 4)
"""Reductions that may be under way at a time."""
FETCHES = (1, 2, 3, 4)
"""Layers before its own at which what a layer offloaded may begin to come back."""


def staying(space: SearchSpace, constraints: Constraints) -> list[Decision]:
    """The decisions of plans that leave everything on the device."""
    profile, rates = space.scheduler.profile, space.scheduler.rates
    found = []
    if profile.training and constraints.sharding == 3:
        found.append(_only(decisions.residency(space), "use" if constraints.stage == 3 else None))
    if profile.training and constraints.recompute in ("auto", "full") and profile.layers:
        full = constraints.recompute == "full" or (space.plan.token_tiles > 1 and not space.plan.by_sample)
        found.append(_only(decisions.recompute_options(space), 0 if full else None))
    prefetches = _prefetches(space, constraints)
    found.append(decisions.prefetch(prefetches))
    if rates.overlaps and prefetches[-1]:
        found.append(decisions.starts(space, prefetches[-1]))
    if profile.training and rates.overlaps and constraints.ranks > 1:
        found.append(decisions.of_step("reductions", UNDER_WAY))
    if profile.training and constraints.saved not in (None, "device"):
        found.append(decisions.of_step("fetch_ahead", FETCHES))
    return found


def _only(decision: Decision, choice: object) -> Decision:
    """``decision`` with one choice, unless that is None."""
    return decision if choice is None else replace(decision, choices=dict.fromkeys(decision.choices, (choice,)))


def all_decisions(
    space: SearchSpace, constraints: Constraints, placements: Sequence[Placement], tiers: Sequence[Tier]
) -> list[Decision]:
    """The decisions where something may leave the device, or be tiled."""
    found = staying(space, constraints)
    if constraints.tiles:
        found.append(decisions.tiles(space))
    if tiers and space.scheduler.profile.training:
        found.append(decisions.placements(space, placements))
        if constraints.activations:
            found += (decisions.offloaded_layers(space, tiers), decisions.offloaded_activations(space, tiers))
            found.append(decisions.of_step("fetch_ahead", FETCHES))
    return found


def _prefetches(space: SearchSpace, constraints: Constraints) -> tuple[int, ...]:
    if constraints.prefetch is not None:
        return (constraints.prefetch,)
    return PREFETCHES if space.scheduler.profile.training and space.plan.buckets else (DEFAULT_PREFETCH,)
