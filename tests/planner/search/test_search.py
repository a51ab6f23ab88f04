"""The search: never far from the best there is, never over the budget, never worse with more of it.

Tests ``planner/search/constraints.py``, ``planner/search/local_search.py`` and ``planner/search/variants.py``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of, transformer
from quick import examples

from zerograph.core.errors import ConfigError
from zerograph.core.executable import missing, tiers_run
from zerograph.core.files.planfile import Holding
from zerograph.core.machine import TIERS, Machine, Tier, machine_named
from zerograph.core.plan import Placement, Plan
from zerograph.core.slots import SLOT, SLOTS
from zerograph.core.step import Step
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.search import decisions, local_search
from zerograph.planner.search.constraints import EXACT, Constraints
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import Candidate, frontier, limits
from zerograph.sim.simulate import simulate

MACHINE = machine_named("h100-80gb")
DGX2 = machine_named("v100-32gb-dgx2")
WISH = Constraints("auto", world_size=8, bucket_size=4096, prefetch=1)

# Seconds of a product and of a gather are of the same order, and so are bytes of parameters and activations.
_LAYER = st.builds(
    Layer,
    rows=st.sampled_from([256, 1024, 4096, 40_000_000]),
    stream=st.sampled_from([1024, 10**6, 10**8]),
    inside=st.sampled_from([4096, 10**7, 10**9]),
    flops=st.sampled_from([10**6, 10**10, 10**12]),
)
_SMALL = st.lists(_LAYER, min_size=1, max_size=4)
_DEEP = st.builds(lambda layer, depth: [layer] * depth, _LAYER, st.integers(5, 40))
_MIXED = st.lists(st.tuples(_LAYER, st.integers(1, 8)), min_size=1, max_size=4).map(
    lambda runs: [layer for layer, count in runs for _ in range(count)]
)


def test_updates_stand_where_the_step_is_fastest() -> None:
    """Never slower than with the place fixed, whatever the memory."""
    step, asked = transformer(4, 4096, 2048), replace(WISH, stage=3, bucket_size=None, offload="parameters")
    found = {place: Search(step, replace(asked, overlap=place), DGX2, work=2_000) for place in ("auto", *EXACT)}
    chosen = set()
    for device in range(1, 12):
        most: dict[Tier, int] = {"device": device * 2**29, "host": 2**34, "nvme": 2**40}
        fixed = {place: best for place in EXACT if (best := found[place].within(most)) is not None}
        auto = found["auto"].within(most)
        assert (auto is None) is (not fixed)
        if auto is not None:
            assert auto.rank == min(best.rank for best in fixed.values())
            assert auto.seconds == forecast_plan(auto.space.scheduler.fresh(), auto.plan)[0].seconds
            chosen.add(auto.plan.overlap)
    assert chosen == {"forward"} and found["auto"].smallest.peak == min(found[place].smallest.peak for place in EXACT)


def test_states_are_updated_where_the_step_is_fastest() -> None:
    """On the device where that saves more than moving them costs; never where something else than the host is."""
    step, asked = transformer(4, 4096, 2048), replace(WISH, stage=3, bucket_size=None, offload="optimizer", tier="host")
    most: dict[Tier, int] = {"device": 2**33, "host": 2**34, "nvme": 0}
    chosen = []
    for faster in (20, 1):
        machine = replace(DGX2, cpu_optimizer=DGX2.cpu_optimizer * faster)
        found = {}
        for place in ("auto", "host", "device"):
            best = Search(step, replace(asked, update=place), machine, work=2_000).within(most)
            assert best is not None
            found[place] = best
        fastest = min((found["host"], found["device"]), key=lambda c: c.rank)
        assert (found["auto"].rank, found["auto"].plan.update) == (fastest.rank, fastest.plan.update)
        chosen.append(fastest.plan.update)
    assert chosen == ["host", "device"]
    on_disk = Search(step, replace(asked, update="auto", tier="nvme"), DGX2, work=2_000).within({**most, "nvme": 2**40})
    assert on_disk is not None and on_disk.plan.update == "host"


def every(search: Search) -> list[Candidate]:
    """All residencies and recomputations of the search's first space."""
    space = search.spaces[0]
    return [
        space.of(plan)
        for plan in local_search.every([decisions.residency(space), decisions.recompute_options(space)], space.plan)
    ]


def near_the_best(search: Search, shares: list[float], least: int = 0) -> None:
    """Within 5 percent of the best of all plans, which are looked at once for many budgets of ``least`` or more."""
    candidates = every(search)
    peaks = [c.peak for c in candidates]
    for share in shares:
        budget = max(min(peaks), least) + int(share * (max(peaks) - min(peaks)))
        best = min(c.seconds for c in candidates if c.peak <= budget)
        found = search.within(budget)
        assert found is not None
        assert found.seconds <= best * 1.05


_BUDGETS = st.lists(st.floats(0, 1), min_size=8, max_size=8)


@settings(max_examples=examples(30), deadline=None)
@given(layers=_SMALL, shares=_BUDGETS)
def test_small_steps_are_within_5_percent_of_brute_force(layers: list[Layer], shares: list[float]) -> None:
    near_the_best(Search(step_of(layers), WISH, MACHINE), shares)


@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None)
@given(layer=_LAYER, shares=_BUDGETS)
def test_layers_that_are_alike_are_within_5_percent_of_brute_force(layer: Layer, shares: list[float]) -> None:
    search = Search(step_of([layer] * 4), WISH, MACHINE)
    near_the_best(search, shares, search.smallest.peak)


@settings(max_examples=examples(40), deadline=None)
@given(layers=st.one_of(_SMALL, _DEEP, _MIXED), shares=st.lists(st.floats(0, 1.2), min_size=2, max_size=6))
def test_more_budget_is_never_worse_and_peaks_fit(layers: list[Layer], shares: list[float]) -> None:
    search = Search(step_of(layers), WISH, MACHINE)
    low, high = search.best[0].peak, search.best[-1].peak
    seconds = float("inf")
    for budget in sorted(low + int(share * (high - low)) for share in shares):
        found = search.within(budget)
        assert found is not None
        assert found.seconds <= seconds
        seconds = found.seconds
        scheduler = search.spaces[0].scheduler
        programs = coarse_programs(scheduler, found.plan)
        forecast, _ = simulate(
            programs, scheduler.rates, held=(Holding("states", "state", "device", search.states, -1, -1),)
        )
        assert all(level <= budget for _, level in forecast.memory["device"])
        assert (forecast.seconds, forecast.peaks["device"].bytes) == (found.seconds, found.peak)
    assert search.within(low - 1) is None


@settings(max_examples=8, deadline=None)
@given(layers=st.one_of(_DEEP, _MIXED), share=st.floats(0, 1), offload=st.sampled_from(["none", "auto"]))
def test_two_ranks_find_the_same_plan(layers: list[Layer], share: float, offload: str) -> None:
    plans = []
    for _ in range(2):
        search = Search(step_of(layers), replace(WISH, offload=offload), MACHINE, work=5_000)  # type: ignore[arg-type]
        low, high = search.best[0].peak, search.best[-1].peak
        found = search.within(low + int(share * (high - low)))
        assert found is not None
        plans.append(found.plan.to_json())
    assert plans[0] == plans[1]


def test_budgets_in_between_mix_residencies_and_recomputation() -> None:
    layers = [Layer(rows=40_000_000, stream=10**7, inside=10**8, flops=10**12)] * 12
    search = Search(step_of(layers), WISH, MACHINE)
    low, high = search.best[0].peak, search.best[-1].peak
    residencies, recomputed = set(), set()
    for share in range(1, 20):
        found = search.within(low + share * (high - low) // 20)
        assert found is not None
        residencies.add(len({b.residency for b in found.plan.buckets}))
        recomputed.add((len(found.plan.recompute), len(found.plan.save)))
    assert 2 in residencies
    assert {(layers, saved) for layers, saved in recomputed if layers == 12 and 0 < saved < 12}


def test_what_the_user_fixed_stays() -> None:
    step = step_of([Layer(rows=40_000_000, inside=10**8)] * 6)
    for stage, residency in ((1, "step"), (3, "use")):
        search = Search(step, Constraints(stage, 8, recompute="full"), MACHINE)  # type: ignore[arg-type]
        assert {c.plan.stage for c in search.best} == {stage}
        assert {b.residency for c in search.best for b in c.plan.buckets} == {residency}
        assert {len(c.plan.recompute) for c in search.best} == {6}
    search = Search(step, Constraints("auto", 8, bucket_size=2**30, prefetch=3, recompute="none"), MACHINE)
    assert {(c.plan.prefetch, c.plan.save_others, c.plan.recompute) for c in search.best} == {(3, True, ())}


def test_without_a_backward_or_parameters_there_is_one_plan() -> None:
    inference = Search(step_of([Layer()] * 3, training=False), WISH, MACHINE)
    assert {b.residency for c in inference.best for b in c.plan.buckets} == {"use"}
    assert {c.plan.recompute for c in inference.best} == {()}


def test_a_step_of_100_layers_is_planned_in_a_moment() -> None:
    """Half a second of one processor's time is the aim, and what it takes alone; others may share the machine."""
    step = step_of([Layer(rows=4_000_000, stream=10**7, inside=10**8, flops=10**12)] * 100)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        found = Search(step, Constraints("auto", 1024), MACHINE).within(12 * 10**9)
        seconds.append(time.process_time() - start)
        assert found is not None
    assert min(seconds) < 1.0


# Plans that offload --------------------------------------------------------------------------------------------------

NO_NVME = replace(MACHINE, nvme_capacity=0)
OFFLOAD = replace(WISH, bucket_size=2**30, offload="auto")


def budgets(found: list[Candidate], shares: list[tuple[float, float, float]]) -> list[dict[Tier, int]]:
    """Of every tier something between the least and the most that any plan needs."""
    ranges = [(min(peaks), max(peaks)) for peaks in zip(*(c.peaks for c in found), strict=True)]
    return [
        {t: low + int(s * (high - low)) for t, s, (low, high) in zip(TIERS, share, ranges, strict=True)}
        for share in shares
    ]


_SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))


@pytest.mark.slow  # test_brute_force.py has fewer plans with placements on two tiers
@settings(max_examples=2, deadline=None, derandomize=True)  # a local search proves nothing: these are its cases
@given(layers=st.lists(_LAYER, min_size=2, max_size=2), shares=st.lists(_SHARES, min_size=20, max_size=20))
def test_offload_to_two_tiers_is_within_5_percent_of_brute_force(
    layers: list[Layer], shares: list[tuple[float, float, float]]
) -> None:
    """All placements, residencies, recomputations and offloads of two layers, up to 9216 plans, against the local
    search."""
    compare(step_of(layers), OFFLOAD, MACHINE, shares)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)  # a local search proves nothing: these are its cases
@given(layers=st.lists(_LAYER, min_size=3, max_size=3), shares=st.lists(_SHARES, min_size=20, max_size=20))
def test_offload_to_one_tier_is_within_5_percent_of_brute_force(
    layers: list[Layer], shares: list[tuple[float, float, float]]
) -> None:
    compare(step_of(layers), replace(OFFLOAD, recompute="none"), NO_NVME, shares)


def compare(step: Step, constraints: Constraints, machine: Machine, shares: list[tuple[float, float, float]]) -> None:
    search = Search(step, constraints, machine)
    (space,) = search.spaces
    several = [
        decisions.residency(space),
        decisions.placements(space, search.placements),
        decisions.offloaded_layers(space, search.tiers),
    ]
    if constraints.recompute == "auto":
        several.append(decisions.recompute_options(space))
    everything = frontier(space.of(plan) for plan in local_search.every(several, space.plan))
    for budget in budgets(everything, shares):
        best = min((c.seconds for c in everything if c.fits(limits(budget))), default=None)
        found = search.within(budget)
        assert best is None or (found is not None and found.seconds <= best * 1.05)


@settings(max_examples=examples(25), deadline=None)
@given(layers=st.one_of(_SMALL, _MIXED), shares=st.lists(_SHARES, min_size=2, max_size=6))
def test_more_of_any_tier_is_never_worse_and_peaks_fit(
    layers: list[Layer], shares: list[tuple[float, float, float]]
) -> None:
    search = Search(step_of(layers), replace(OFFLOAD, bucket_size=2**26), MACHINE, work=10_000)
    for budget in budgets(search.best, shares):
        found = search.within(budget)
        for tier in TIERS:
            more = search.within({**budget, tier: budget[tier] * 2})
            assert found is None or (more is not None and more.seconds <= found.seconds)
        if found is not None:
            forecast, _ = forecast_plan(found.space.scheduler, found.plan)
            assert all(level <= budget[t] for t, curve in forecast.memory.items() for _, level in curve)
            assert not list(found.plan.mistakes())
            assert Plan.from_json(found.plan.to_json()) == found.plan


def test_offload_never_makes_plans_slower_that_stay_on_the_device() -> None:
    """Also where plans that leave it are too many to look at with one thing fixed."""
    step = step_of([Layer(rows=40_000_000, stream=10**7, inside=10**8, flops=10**12)] * 33)
    plain, wider = (Search(step, Constraints("auto", 8, offload=offload), MACHINE) for offload in ("none", "auto"))  # type: ignore[arg-type]
    for candidate in plain.best:
        found = wider.within({"device": candidate.peak})
        assert found is not None and found.seconds <= candidate.seconds


@settings(max_examples=5, deadline=None)
@given(layers=st.one_of(_SMALL, _MIXED), shares=st.lists(_SHARES, min_size=20, max_size=20), data=st.data())
def test_fixing_something_never_helps(
    layers: list[Layer], shares: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    step, offload = step_of(layers), data.draw(st.sampled_from(["none", "auto"]))
    machine = data.draw(st.sampled_from([MACHINE, NO_NVME, machine_named("cpu"), DGX2]))
    constraints = Constraints("auto", 8, offload=offload)  # type: ignore[arg-type]
    search = Search(step, constraints, machine, work=2_000)
    one = data.draw(st.sampled_from(list(search.with_one_fixed())))
    fixed = Search(step, one, machine, work=2_000)
    for budget in budgets([*search.best, *fixed.best], shares):
        best, found = search.within(budget), fixed.within(budget)
        assert found is None or (best is not None and best.seconds <= found.seconds)


@pytest.mark.slow
@example(
    layers=[Layer(256, 1024, 4096, 10**6), *[Layer(40_000_000, 1024, 4096, 10**6)] * 5]
)  # what may be tiled is no part of what stays
@settings(max_examples=examples(10), deadline=None)
@given(layers=st.one_of(_SMALL, _MIXED))
def test_another_tier_never_makes_a_plan_slower(layers: list[Layer]) -> None:
    """More tiers are more plans: what fits without is still looked at."""
    step, constraints = step_of(layers), replace(WISH, bucket_size=2**26)
    plain, wider = (
        Search(step, constraints, MACHINE),
        Search(step, replace(constraints, offload="auto"), MACHINE, work=10_000),
    )
    for candidate in plain.best:
        budget: dict[Tier, int] = {"device": candidate.peak}
        found = wider.within(budget)
        assert found is not None and found.seconds <= candidate.seconds and found.peaks[1:] == (0, 0)


@settings(max_examples=5, deadline=None)
@given(layers=st.one_of(_SMALL, _MIXED), offload=st.sampled_from(["optimizer", "parameters", "auto"]))
def test_a_backend_is_given_what_it_can_execute(layers: list[Layer], offload: Any) -> None:
    cpu, runs = machine_named("cpu"), tiers_run(machine_named("cpu"))
    constraints = replace(WISH, offload=offload, executable=runs)
    search = Search(step_of(layers), constraints, cpu)
    assert not any(missing(candidate.plan, runs) for candidate in search.best)
    offloaded = {tier for c in search.best for b in c.plan.buckets for tier in b.placement.offload_tiers}
    assert offloaded == {"nvme"} or offload == "auto"
    if offload == "auto":  # what stays in memory is updated faster
        found = search.within({"device": 2**60, "nvme": 2**60})
        assert found is not None and {b.placement for b in found.plan.buckets} == {Placement()}
    with pytest.raises(ConfigError, match=f"on {MACHINE.name} nothing can leave the device yet"):
        Search(step_of(layers), replace(constraints, executable=()), MACHINE)


@pytest.mark.parametrize(("rows", "slot"), [(2**24, 7 * 4 * 2**21), (2**26, SLOT)])
def test_slots_count_on_a_cpu_where_states_leave(rows: int, slot: int) -> None:
    """Of 4 bytes for each of seven kinds of the elements that a rank has of the largest bucket, at most."""
    constraints = replace(
        WISH, bucket_size=2**22, prefetch=0, offload="parameters", executable=tiers_run(machine_named("cpu"))
    )
    for best in Search(step_of([Layer(rows=rows)] * 2), constraints, machine_named("cpu")).best:
        assert best.held == SLOTS * slot < best.peak  # beside them nothing is held from step to step


def test_nothing_is_offloaded_to_a_tier_that_is_not_there() -> None:
    step, cpu = step_of([Layer(rows=2**26)] * 8), machine_named("cpu")
    for machine, tiers in ((cpu, {"nvme"}), (replace(cpu, nvme_capacity=0), set()), (NO_NVME, {"host"})):
        search = Search(step, OFFLOAD, machine)
        used = {t for c in search.best for b in c.plan.buckets for t in (b.placement.optimizer, b.placement.parameters)}
        used |= {tier for c in search.best for _, tier in c.plan.offload}
        assert used - {"device"} == tiers


def test_offload_that_was_asked_for_is_what_is_planned() -> None:
    step = step_of([Layer(rows=2**20)] * 6)
    for stage, kind, tier in ((1, "optimizer", "host"), (2, "gradients", "nvme"), ("auto", "parameters", "nvme")):
        search = Search(step, replace(OFFLOAD, stage=stage, offload=kind, tier=tier), MACHINE)  # type: ignore[arg-type]
        placements = {b.placement for c in search.best for b in c.plan.buckets}
        level = ("optimizer", "gradients", "parameters").index(kind)
        assert {h.least_stage for h in placements} == {level + 1}
        assert {h.optimizer for h in placements} == {tier}
    with pytest.raises(ConfigError, match="stage 1 cannot offload parameters"):
        Search(step, Constraints(1, 8, offload="parameters"), MACHINE)
    with pytest.raises(ConfigError, match="cpu has no host memory to offload to"):
        Search(step, replace(OFFLOAD, tier="host"), machine_named("cpu"))


@pytest.mark.slow
def test_large_operators_are_tiled_where_they_do_not_fit_whole() -> None:
    step = step_of([Layer(rows=2**26, stream=1024, inside=1024)] * 2)  # 256 MiB each when whole
    search = Search(step, Constraints("auto", 64, offload="auto"), MACHINE)
    plans = [c.plan for c in search.best if c.peak < 200 * 2**20]
    assert plans and all(b.tiles > 1 for plan in plans for b in plan.buckets)
    fastest = search.within({"device": 80 * 10**9})
    assert fastest is not None and {b.tiles for b in fastest.plan.buckets} == {1}


def test_tiles_are_looked_at_with_the_prefetch_that_was_asked_for() -> None:
    step = step_of([Layer(rows=2**26, stream=1024, inside=1024)] * 2)
    search = Search(step, Constraints("auto", 64, offload="auto", prefetch=2), MACHINE)
    assert any(b.tiles > 1 for c in search.best for b in c.plan.buckets)
    assert {c.plan.prefetch for c in search.best} == {2}


def test_offload_of_a_step_of_100_layers_is_planned_in_bounded_work() -> None:
    """Counted in work: seconds depend on what shares the processor, and were over any bound beside other tests."""
    step = step_of([Layer(rows=4_000_000, stream=10**7, inside=10**8, flops=10**12)] * 100)
    search = Search(step, Constraints("auto", 8, offload="auto"), MACHINE)
    assert search.within({"device": 10**9, "host": 250 * 10**9}) is not None
    assert search.within({"device": 10**9}) is None
    assert sum(space.work for space in search.spaces) < 300_000  # tasks, of 5 us or so


@pytest.mark.slow
def test_a_trillion_parameters_fit_one_dgx2() -> None:
    """As ZeRO-Infinity has it (Rajbhandari et al. 2021): nothing but a deep step's depth stood in the way."""
    step = transformer(layers=128, hidden=25600, tokens=12 * 1024)
    assert sum(p.elements for p in step.params) > 10**12
    search = Search(step, Constraints("auto", 16, offload="auto"), DGX2)
    found = search.within(DGX2.budget(16, 0.06))
    assert found is not None and {b.placement.optimizer for b in found.plan.buckets} == {"nvme"}
    assert len(found.plan.buckets) == 512
    assert sum(space.work for space in search.spaces) < 800_000  # tasks, of 5 us or so
