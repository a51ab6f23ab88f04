"""Decisions: every change is a plan that makes sense, and half the way lies between two plans.

Tests ``planner/search/search_space.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of
from quick import examples

from zerograph.core.machine import machine_named
from zerograph.core.plan import Bucket, Plan, decided
from zerograph.planner.explain.check import check_plan
from zerograph.planner.search import decisions
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.decisions import Decision, all_decisions, by_reward, halfway, in_runs, spread
from zerograph.planner.search.local_search import neighbours
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import SearchSpace

GPU = machine_named("h100-80gb")
STEP = step_of([Layer(rows=2**20, stream=1024, inside=10**6, flops=10**12)] * 5)
SEARCH = Search(STEP, Constraints("auto", 8, bucket_size=2**20, offload="auto"), GPU, work=300)
SPACE = SEARCH.spaces[0]
STEP_LAYER = "blocks.0"


def every_decision(space: SearchSpace) -> dict[str, Decision]:
    return {
        "residency": decisions.residency(space),
        "levels": decisions.recompute_options(space),
        "prefetch": decisions.prefetch((0, 1, 2, 4)),
        "starts": decisions.starts(space, 4),
        "tiles": decisions.tiles(space),
        "placement": decisions.placements(space, SEARCH.placements),
        "offloaded_layers": decisions.offloaded_layers(space, SEARCH.tiers),
        "offloaded_activations": decisions.offloaded_activations(space, SEARCH.tiers),
        "reductions": decisions.of_step("reductions", (1, 2)),
        "fetch_ahead": decisions.of_step("fetch_ahead", (1, 2)),
    }


DECISIONS = every_decision(SPACE)


@st.composite
def changed_plans(draw: st.DrawFn) -> Plan:
    """A plan after a few changes of single items of any decision."""
    plan = SPACE.plan
    for _ in range(draw(st.integers(0, 12))):
        decision = draw(st.sampled_from([decision for decision in DECISIONS.values() if decision.choices]))
        item = draw(st.sampled_from(list(decision.choices)))
        plan = decision.apply(plan, {item: draw(st.sampled_from(list(decision.choices[item])))})
    return plan


@settings(max_examples=examples(60), deadline=None)
@given(plan=changed_plans())
def test_whatever_is_turned_the_plan_makes_sense(plan: Plan) -> None:
    assert list(plan.mistakes()) == []
    assert check_plan(STEP, plan) == []
    assert Plan.from_json(plan.to_json()) == plan
    found = SPACE.of(plan)
    assert found.seconds > 0 and found.peak > 0
    assert SPACE.of(plan) is found


@settings(max_examples=examples(30), deadline=None)
@given(plan=changed_plans(), groups=st.sampled_from([1, 2, 100]))
def test_changes_are_of_one_decision(plan: Plan, groups: int) -> None:
    for name, decision in DECISIONS.items():
        for changed in neighbours([decision], plan, groups):
            others = [
                other
                for other in DECISIONS
                if other != name and DECISIONS[other].read(plan) != DECISIONS[other].read(changed)
            ]
            # Prefetch bounds starts, tiles are not kept, and both decisions of activations change one field.
            allowed = {
                "prefetch": {"starts"}, "tiles": {"residency"}, "offloaded_layers": {"offloaded_activations"},
                "offloaded_activations": {"offloaded_layers"},
            }  # fmt: skip
            assert set(others) <= allowed.get(name, set()), name


@settings(max_examples=examples(30), deadline=None)
@given(a=changed_plans(), b=changed_plans())
def test_half_the_way_has_the_values_of_either(a: Plan, b: Plan) -> None:
    own = [DECISIONS[name] for name in ("residency", "placement", "reductions", "tiles")]
    middle = halfway(own, a, b)
    assert list(middle.mistakes()) == []
    for decision in (DECISIONS["placement"], DECISIONS["reductions"]):
        before, after, now = decision.read(a), decision.read(b), decision.read(middle)
        assert all(now[item] in (before[item], after[item]) for item in now)
        differ = sum(before[item] != after[item] for item in now)
        assert sum(now[item] != before[item] for item in now) == differ // 2


def test_one_group_of_those_that_are_alike_is_turned() -> None:
    step = step_of([Layer(rows=2**20, stream=1024, inside=10**6, flops=10**12)] * 16)
    search = Search(step, Constraints("auto", 8, bucket_size=2**20, offload="auto"), GPU, work=300)
    decision, plan = decisions.placements(search.spaces[0], search.placements), search.spaces[0].plan
    assert len(list(decision.changes(plan, 4))) == len(search.placements) - 1
    assert len(list(decision.changes(plan, 100))) == 16 * (len(search.placements) - 1)


def test_every_decision_is_turned_by_the_search() -> None:
    """But for those that the constraints, the buckets, or the tiles of the profile fix."""
    plan = replace(SPACE.plan, offload=((STEP_LAYER, "host"),), prefetch=2)
    moved: set[str] = set()
    for decision in all_decisions(SPACE, SEARCH.constraints, SEARCH.placements, SEARCH.tiers):
        for changed in decision.changes(plan, 1):
            moved |= {name for name in decided(Plan) if getattr(plan, name) != getattr(changed, name)}
            for old, new in zip(plan.buckets, changed.buckets, strict=True):
                moved |= {f"bucket.{name}" for name in decided(Bucket) if getattr(old, name) != getattr(new, name)}
    fixed = {"stage", "world_size", "replicas", "save_others", "loss_tiles", "token_tiles", "by_sample", "update"}
    fixed |= {"overlap"}
    of_buckets = {f"bucket.{name}" for name in decided(Bucket)}
    assert moved == set(decided(Plan)) - fixed | of_buckets


def test_orders() -> None:
    assert [list(run) for run in in_runs(range(5), 2)] == [[0, 1], [2, 3, 4]]
    assert [list(run) for run in in_runs((), 4)] == []
    assert sorted(spread(range(9))) == list(range(9)) and spread(range(9))[0] == 8
    assert by_reward(["a", "b", "c"], {"a": 1.0, "b": 2.0, "c": 1.0}.__getitem__) == ["b", "c", "a"]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_spread_leaves_no_large_gap(count: int) -> None:
    first = sorted(spread(range(64))[:count])
    gaps = [b - a for a, b in zip([-1, *first], [*first, 64], strict=True)]
    assert max(gaps) <= 2 * 64 // count + 1
