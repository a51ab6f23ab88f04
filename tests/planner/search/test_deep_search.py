"""The search of deep steps where nothing is fixed: few layers tell what all do, and what it finds fits.

Tests ``planner/search/few_layers.py`` and ``planner/programs/periods.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from planner.steps import transformer

from zerograph.core.config import Recompute
from zerograph.core.machine import TIERS, Tier, machine_named
from zerograph.core.param_bytes import state_bytes
from zerograph.core.plan import Offload, Overlap, Placement
from zerograph.core.step import Step
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.search.constraints import Constraints, open_placements
from zerograph.planner.search.decisions import all_decisions, first
from zerograph.planner.search.few_layers import by_few_layers
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import SearchSpace
from zerograph.planner.search.variants import spaces_of, variants_of

OPEN = Constraints("auto", 16, offload="auto")
DGX2 = machine_named("v100-32gb-dgx2")
LAYERS = 36


@cache
def searched(constraints: Constraints = OPEN) -> Search:
    return Search(transformer(LAYERS, 12288, 4096), constraints, DGX2)


def space_of(step: Step, constraints: Constraints) -> SearchSpace:
    """The first space of a search, which nobody searches."""
    states = sum(state_bytes(step.over(16).params, 2))
    variant = variants_of(Graph.of(step), constraints, DGX2)[0]
    return next(spaces_of(step, constraints, DGX2, states, 2, variant))


def budget(*shares: float) -> dict[Tier, int]:
    return {tier: int(DGX2.capacity(tier, 16) * share) for tier, share in zip(TIERS, shares, strict=True)}


@pytest.mark.slow
def test_fixing_something_does_not_help() -> None:
    for constraints in (replace(OPEN, prefetch=0), replace(OPEN, offload="optimizer"), replace(OPEN, stage=3)):
        for shares in ((1, 1, 1), (0.7, 1, 1), (1, 0.3, 1)):
            best, found = searched().within(budget(*shares)), searched(constraints).within(budget(*shares))
            assert found is None or (best is not None and best.seconds <= found.seconds), constraints


@pytest.mark.slow
def test_more_is_never_worse_and_what_is_found_fits() -> None:
    seconds = float("inf")
    for share in (0.3, 0.5, 0.7, 0.9, 1.1):
        most = budget(share, 0.9, 0.9)
        found = searched().within(most)
        if found is None:
            assert seconds == float("inf")
            continue
        assert found.seconds <= seconds
        seconds = found.seconds
        forecast, _ = forecast_plan(found.space.scheduler, found.plan)
        peaks = tuple(forecast.peaks[tier].bytes if tier in forecast.peaks else 0 for tier in TIERS)
        assert (forecast.seconds, peaks) == (found.seconds, found.peaks)
        assert all(peak <= most[tier] for tier, peak in zip(TIERS, peaks, strict=True))
        assert len(found.plan.buckets) == 4 * LAYERS and not list(found.plan.mistakes())
    assert seconds < float("inf")


@pytest.mark.slow
def test_few_layers_tell_what_all_of_them_do() -> None:
    few = by_few_layers(space_of(transformer(LAYERS, 12288, 4096), OPEN))
    # Two of the layers that are alike, and the first and the last, which are not.
    assert few is not None and len(few.plan.buckets) == 16
    rough = few.of(few.plan)
    full = few.full_of(rough)
    assert rough.seconds == pytest.approx(full.seconds, rel=0.001)
    assert rough.peaks == pytest.approx(full.peaks, rel=0.001)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("offload", ["none", "parameters"])
def test_layers_that_share_buckets_with_their_neighbours_tell_it_too(
    prefetch: int, recompute: Recompute, offload: Offload
) -> None:
    """A small parameter at both ends of a layer goes with its neighbour's; nothing is left over where layers are."""
    step, tier = transformer(LAYERS, 12288, 4096, small=True), "host"
    constraints = Constraints(3, 16, prefetch=prefetch, recompute=recompute, offload=offload)
    space = space_of(step, replace(constraints, tile=False))
    assert len(space.plan.buckets) > 4 * LAYERS
    few = by_few_layers(space)
    assert few is not None and len(few.plan.buckets) < 40
    placement = Placement(tier, tier, tier) if offload == "parameters" else Placement()
    rough = few.of(replace(few.plan, buckets=tuple(replace(b, placement=placement) for b in few.plan.buckets)))
    full = few.full_of(rough)
    assert {b.placement for b in full.plan.buckets} == {placement}
    assert rough.seconds == pytest.approx(full.seconds, rel=1e-6)
    assert rough.peaks == pytest.approx(full.peaks, rel=1e-9)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward", "delayed"])
def test_few_layers_tell_it_wherever_things_go(overlap: Overlap) -> None:
    """Plans that need the least of a tier, for each number of layers whose activations are fetched ahead."""
    step, constraints = transformer(LAYERS, 12288, 4096), replace(OPEN, overlap=overlap)
    few = by_few_layers(space_of(step, constraints))
    assert few is not None
    tiers = constraints.tiers(DGX2)
    own = all_decisions(few, constraints, open_placements("auto", tiers, constraints.sharding), tiers)
    least = list(first(few.plan, own, least=True))
    for i, plan in enumerate(least[:: len(least) // 6]):
        rough = few.of(replace(plan, fetch_ahead=(1, 2, 4)[i % 3], prefetch=(0, 1, 4)[i // 3 % 3]))
        full = few.full_of(rough)
        assert rough.seconds == pytest.approx(full.seconds, rel=1e-6)
        assert rough.peaks == pytest.approx(full.peaks, rel=1e-6)


def test_few_layers_are_not_asked_where_all_are_cheap_to_simulate() -> None:
    assert by_few_layers(space_of(transformer(8, 12288, 4096), replace(OPEN, offload="none"))) is None
