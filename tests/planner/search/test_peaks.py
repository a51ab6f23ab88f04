"""Plans are changed where they have their peak only: gathers that wait, operators in as few tiles as fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of
from quick import examples

from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import machine_named
from zerograph.core.plan import Plan
from zerograph.planner.explain.reasons import under_way
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import Candidate
from zerograph.planner.search.variants import MOST_TILES

MIB = 2**20
GPU = machine_named("h100-80gb")
TILED = Constraints(3, 64, bucket_size=8 * MIB, prefetch=0, recompute="full", tile=True)


ROWS = [MIB, 64 * MIB, 4 * MIB, 8 * MIB]
"""Of the first layer, too few for tiles: its reduction is the last, and would overlap itself in parts."""


def tiles(found: Candidate) -> tuple[int, ...]:
    return tuple(bucket.tiles for bucket in found.plan.buckets)


def plain(search: Search, prefetch: int = 0, **of_buckets: Sequence[object]) -> Candidate:
    """The plan by rule with these fields of its buckets."""
    plan = replace(search.spaces[0].plan, prefetch=prefetch)
    for field, values in of_buckets.items():
        buckets = tuple(replace(b, **{field: v}) for b, v in zip(plan.buckets, values, strict=True))  # type: ignore[arg-type]
        plan = replace(plan, buckets=buckets)
    return search.spaces[0].of(plan)


def within(search: Search, budget: int) -> Candidate:
    found = search.within(budget)
    assert found is not None
    return found


def test_only_what_does_not_fit_is_tiled() -> None:
    """Three parameters are larger than a bucket; the budget is short of room for one of them."""
    search = Search(step_of([Layer(rows=r, stream=1024, inside=1024, flops=10**13) for r in ROWS]), TILED, GPU)
    untiled = plain(search).peak
    assert tiles(within(search, untiled)) == (1, 1, 1, 1)
    less = tiles(within(search, untiled - 128 * MIB))
    assert 1 < less[1] < MOST_TILES and (less[0], less[2], less[3]) == (1, 1, 1)
    least = tiles(search.smallest)
    assert least[1] == MOST_TILES and least[0] == 1


def test_less_memory_takes_more_tiles_of_the_same_operator() -> None:
    search = Search(step_of([Layer(rows=r, stream=1024, inside=1024, flops=10**13) for r in ROWS]), TILED, GPU)
    low, high = search.smallest.peak, plain(search).peak
    counts = [max(tiles(within(search, low + (high - low) * k // 4))) for k in range(5)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[4] == 1


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.sampled_from([MIB, 4 * MIB, 16 * MIB, 64 * MIB]), min_size=2, max_size=2),
    inside=st.sampled_from([1024, 10**8]),
    shares=st.lists(st.floats(0, 1), min_size=8, max_size=8),
)
def test_tiles_are_within_5_percent_of_brute_force(rows: list[int], inside: int, shares: list[float]) -> None:
    search = Search(step_of([Layer(rows=r, stream=1024, inside=inside, flops=10**12) for r in rows]), TILED, GPU)
    space = search.spaces[0]
    counts = [sorted({*range(1, min(9, most + 1)), most}) for most in space.most_tiles]
    everything = [plain(search, tiles=chosen) for chosen in product(*counts)]
    peaks = [c.peak for c in everything]
    for share in shares:
        budget = min(peaks) + int(share * (max(peaks) - min(peaks)))
        best = min(c.seconds for c in everything if c.peak <= budget)
        assert within(search, budget).seconds <= best * 1.05


# Gathers that wait ---------------------------------------------------------------------------------------------------

STEEP = [Layer(rows=r, stream=1024, inside=i, flops=10**12) for r, i in [(40 * MIB, 1024)] * 3 + [(40 * MIB, 10**9)]]
AHEAD = Constraints(3, 8, bucket_size=8 * MIB, prefetch=2, recompute="none")


def test_a_gather_waits_where_memory_is_short_and_nowhere_else() -> None:
    """One layer's work takes a gigabyte: what is gathered ahead beside it would not fit, and elsewhere it does."""
    search = Search(step_of(STEEP), AHEAD, GPU)
    most, least = search.best[-1], search.smallest
    assert most.seconds == plain(search, prefetch=2).seconds
    assert min(least.plan.ahead()) == 0 < max(least.plan.ahead())
    nowhere = Search(step_of(STEEP), replace(AHEAD, prefetch=0), GPU).smallest
    assert least.peak <= nowhere.peak and least.seconds < nowhere.seconds


@settings(max_examples=examples(10), deadline=None, derandomize=True)
@given(
    layers=st.lists(
        st.builds(
            Layer,
            rows=st.sampled_from([MIB, 10 * MIB, 40 * MIB]),
            stream=st.sampled_from([1024, 10**8]),
            inside=st.sampled_from([1024, 10**8, 10**9]),
            flops=st.sampled_from([10**10, 10**12]),
        ),
        min_size=2,
        max_size=4,
    ),
    shares=st.lists(st.floats(0, 1), min_size=8, max_size=8),
)
def test_starts_are_within_5_percent_of_brute_force(layers: list[Layer], shares: list[float]) -> None:
    search = Search(step_of(layers), AHEAD, GPU)
    space = search.spaces[0]
    every = product((0, 1, None), repeat=len(space.plan.buckets))
    everything = [plain(search, prefetch=2, ahead=chosen) for chosen in every]
    peaks = [c.peak for c in everything]
    for share in shares:
        budget = min(peaks) + int(share * (max(peaks) - min(peaks)))
        best = min(c.seconds for c in everything if c.peak <= budget)
        assert within(search, budget).seconds <= best * 1.05


def test_plans_with_gathers_that_wait_can_be_run_and_written() -> None:
    found = Search(step_of(STEEP), AHEAD, GPU).smallest
    plan, (forecast, holdings) = found.plan, forecast_plan(found.space.scheduler, found.plan)
    assert PlanFile("any", plan, GPU, {}, forecast, holdings).unexecuted == "" and not list(plan.mistakes())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("machine", ["h100-80gb", "cpu"])
def test_what_was_lowered_is_forecast_as_it_was_found(machine: str) -> None:
    search = Search(step_of(STEEP), replace(AHEAD, stage="auto", tile=True), machine_named(machine))
    for found in search.best:
        forecast, _ = forecast_plan(found.space.scheduler, found.plan)
        assert (forecast.seconds, forecast.peaks["device"].bytes) == (found.seconds, found.peak)


def test_more_reductions_are_under_way_where_one_is_longer_than_a_layer() -> None:
    """A layer with much to reduce and little to compute, between layers of the other kind: its reduction has time."""
    few, many = Layer(rows=10**6, inside=10**6, flops=10**12), Layer(rows=10**8, inside=10**6, flops=10**10)
    step = step_of([few, few, many, many, few, few, few, few])
    machine = machine_named("h100-80gb").with_precision("high")
    search = Search(step, Constraints("auto", 8, bucket_size=2**20, prefetch=4), machine)
    chosen = [c for c in search.best if c.plan.reductions > 1]
    assert chosen
    for candidate in chosen:
        waiting = candidate.space.of(replace(candidate.plan, reductions=1))
        assert candidate.seconds < waiting.seconds
        assert [reason.subject for reason in under_way(candidate.plan)] == ["reductions"]
    assert list(under_way(replace(chosen[0].plan, reductions=1))) == []
