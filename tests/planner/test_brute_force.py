"""The search against every plan there is of small steps: each decision of each bucket and layer, one by one.

Plans are enumerated here as plans, not as candidates of the search, and judged by the forecast that is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of

from zerograph.core.machine import TIERS, Machine, Tier, machine_named
from zerograph.core.param_bytes import state_bytes
from zerograph.core.plan import Bucket, Placement, Plan
from zerograph.core.step import Step
from zerograph.planner.profile.regions import profile
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import time_and_peaks

GPU, WORLD, SIZE = machine_named("h100-80gb"), 8, 2**26
TOLERANCE = 1.05
Peaks = tuple[int, ...]
ACTIVATIONS = ("up", "act")
"""What a layer of these steps saves inside."""

# Work, transfers and bytes of all kinds are of the same order, so that every decision may matter.
_LAYER = st.builds(
    Layer,
    rows=st.sampled_from([1024, 10**6, 10**7, 4 * 10**7]),
    stream=st.sampled_from([1024, 10**7, 10**8]),
    inside=st.sampled_from([1024, 10**8, 10**9]),
    flops=st.sampled_from([10**6, 10**11, 10**12, 10**13]),
)
_SHARES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=12, max_size=12)


def unsharded(step: Step, prefetch: int) -> Plan:
    return plan_step(step, stage=3, world_size=WORLD, bucket_size=SIZE, prefetch=prefetch)


def residencies(plan: Plan) -> Iterator[Plan]:
    for chosen in product(("use", "backward"), repeat=len(plan.buckets)):
        yield with_buckets(plan, [replace(b, residency=r) for b, r in zip(plan.buckets, chosen, strict=True)])  # type: ignore[arg-type]


def starts(plan: Plan) -> Iterator[Plan]:
    for chosen in product(range(plan.prefetch + 1), repeat=len(plan.buckets)):
        yield with_buckets(plan, [replace(b, ahead=ahead) for b, ahead in zip(plan.buckets, chosen, strict=True)])


def placements(plan: Plan, tiers: tuple[Tier, ...] = TIERS) -> Iterator[Plan]:
    """Every placement of every bucket that goes with stage 3, also those that the search does not look at."""
    every = [h for h in (Placement(*three) for three in product(tiers, repeat=3)) if h.in_order]
    for chosen in product(every, repeat=len(plan.buckets)):
        yield with_buckets(
            plan, [replace(b, placement=placement) for b, placement in zip(plan.buckets, chosen, strict=True)]
        )


def recomputations(plan: Plan, layers: int) -> Iterator[Plan]:
    """Every activation of every layer saved or recomputed."""
    ways = [None, *(subset for size in range(3) for subset in combinations(ACTIVATIONS, size))]
    for chosen in product(ways, repeat=layers):
        again = [(f"blocks.{i}", names) for i, names in enumerate(chosen) if names is not None]
        save = tuple(f"{layer}:{name}" for layer, names in again for name in names)
        yield replace(plan, recompute=tuple(layer for layer, _ in again), save=save)


def with_buckets(plan: Plan, buckets: list[Bucket]) -> Plan:
    return replace(plan, buckets=tuple(buckets))


def judged(step: Step, plans: Iterator[Plan], machine: Machine) -> list[tuple[float, Peaks]]:
    """Seconds and peaks of each of ``plans``, whose buckets hold the same parameters."""
    first = next(plans)
    rates = Rates(machine, WORLD, "float32")
    layers = [f"blocks.{i}" for i in range(len(step.params))]
    subsets = [subset for size in (1, 2) for subset in combinations(ACTIVATIONS, size)]
    saved_sets = {layer: [frozenset(f"{layer}:{name}" for name in names) for names in subsets] for layer in layers}
    scheduler = Scheduler(
        profile(step, saved_sets=saved_sets), [b.params for b in first.buckets], [b.name for b in first.buckets], rates
    )
    held = (("device", sum(state_bytes(step.over(WORLD).params, 2))),)
    found = []
    for plan in (first, *plans):
        assert not list(plan.mistakes())
        moved = scheduler.moved(plan)
        found.append(time_and_peaks(coarse_programs(scheduler, plan), scheduler.shared.costs, (*held, *moved))[:2])  # type: ignore[arg-type]
    return found


def compare(search: Search, everything: list[tuple[float, Peaks]], shares: list[tuple[float, ...]]) -> None:
    ranges = [(min(found), max(found)) for found in zip(*(peaks for _, peaks in everything), strict=True)]
    for share in shares:
        limits = [low + int(s * (high - low)) for s, (low, high) in zip(share, ranges, strict=True)]
        fit = [seconds for seconds, peaks in everything if all(p <= m for p, m in zip(peaks, limits, strict=True))]
        budget: dict[Tier, int] = dict(zip(TIERS, limits, strict=True))
        found = search.within(budget)
        assert found is not None or not fit
        assert not fit or (found is not None and found.seconds <= min(fit) * TOLERANCE)


@example(layers=[Layer(1024, 1024, 1024, 10**11), Layer(4 * 10**7, 1024, 1024, 10**6)], shares=[(0.0, 0.0, 0.0)])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(layers=st.lists(_LAYER, min_size=2, max_size=2), shares=_SHARES)
def test_residency_recomputation_and_starts(layers: list[Layer], shares: list[tuple[float, ...]]) -> None:
    """Up to 2,800 plans of two layers."""
    compare_stays(layers, shares)


@pytest.mark.slow
def test_residency_recomputation_and_starts_of_three_buckets() -> None:
    """27,000 plans that gather up to two buckets ahead."""
    sizes = (10**7, 10**7, 10**8, 10**11), (4 * 10**7, 10**8, 1024, 10**12), (10**7, 1024, 10**9, 10**13)
    shares = [(share / 11,) * 3 for share in range(12)]
    compare_stays([Layer(*each) for each in sizes], shares, prefetches=(2,), reductions=(1,))


def compare_stays(
    layers: list[Layer],
    shares: list[tuple[float, ...]],
    prefetches: Sequence[int] = (0, 1, 2),
    reductions: Sequence[int] = (1, 2),
) -> None:
    """Of plans whose shards, activations and states all stay on the device."""
    step = step_of(layers)
    plans = (
        recomputed
        for prefetch, waiting in product(prefetches, reductions)
        for started in starts(replace(unsharded(step, prefetch), reductions=waiting))
        for kept in residencies(started)
        for recomputed in recomputations(kept, len(layers))
    )
    compare(Search(step, Constraints("auto", WORLD, bucket_size=SIZE), GPU), judged(step, plans, GPU), shares)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(layers=st.lists(_LAYER, min_size=2, max_size=2), shares=_SHARES)
def test_placement_residency_and_recomputation(layers: list[Layer], shares: list[tuple[float, ...]]) -> None:
    step = step_of(layers)
    plans = (
        recomputed
        for placed in placements(unsharded(step, 1))
        for kept in residencies(placed)
        for recomputed in recomputations(kept, len(layers))
    )
    constraints = Constraints("auto", WORLD, bucket_size=SIZE, prefetch=1, offload="auto", tile=False)
    compare(Search(step, constraints, GPU), judged(step, plans, GPU), shares)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(layers=st.lists(_LAYER, min_size=2, max_size=2), shares=_SHARES)
def test_placement_residency_and_activations_on_one_tier(layers: list[Layer], shares: list[tuple[float, ...]]) -> None:
    """Every layer's activations kept, recomputed or offloaded, with every placement on the device and the host."""
    machine, step = replace(GPU, nvme_capacity=0), step_of(layers)
    plans = (
        replace(recomputed, offload=tuple((f"blocks.{i}", "host") for i, offloaded in enumerate(waits) if offloaded))
        for placed in placements(unsharded(step, 1), TIERS[:2])
        for kept in residencies(placed)
        for recomputed in recomputations(kept, len(layers))
        for waits in product((False, True), repeat=len(layers))
    )
    constraints = Constraints("auto", WORLD, bucket_size=SIZE, prefetch=1, offload="auto", tile=False)
    compare(Search(step, constraints, machine), judged(step, plans, machine), shares)


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(layers=st.lists(_LAYER, min_size=2, max_size=2), shares=_SHARES)
def test_each_activation_kept_recomputed_or_offloaded(layers: list[Layer], shares: list[tuple[float, ...]]) -> None:
    """One by one, with every residency, coming back early or late; shards stay, where the search may move them."""
    machine, step = replace(GPU, nvme_capacity=0), step_of(layers)
    inside = [f"blocks.{i}:{name}" for i in range(len(layers)) for name in (*ACTIVATIONS, "out")]
    plans = (
        replace(
            recomputed,
            offload=tuple((name, "host") for name, offloaded in zip(inside, waits, strict=True) if offloaded),
            fetch_ahead=ahead,
        )
        for kept in residencies(unsharded(step, 1))
        for recomputed in recomputations(kept, len(layers))
        for waits in product((False, True), repeat=len(inside))
        for ahead in ((1, 2) if any(waits) else (1,))
    )
    constraints = Constraints("auto", WORLD, bucket_size=SIZE, prefetch=1, offload="auto", tile=False)
    compare(Search(step, constraints, machine), judged(step, plans, machine), shares)
