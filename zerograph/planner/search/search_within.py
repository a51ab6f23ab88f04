"""The plan within a budget: the loss, and then layers, are in tiles only where nothing fits without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zerograph.core.machine import Machine, Tier
from zerograph.core.step import Step
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import head_of
from zerograph.planner.profile.token_tiles import regions_of
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import Candidate


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
        states, moments: as for :class:`~zerograph.planner.search.search.Search`.
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
