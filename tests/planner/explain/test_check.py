"""A plan for a step: true of all that are made, and found wherever it is broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of, transformer
from quick import examples

from zerograph.core.errors import ConfigError, InvariantError
from zerograph.core.machine import machine_named
from zerograph.core.plan import GivenPlan, Placement, Plan
from zerograph.core.step import Step
from zerograph.planner.explain.check import CHECKS, check_plan, require_plan
from zerograph.planner.explain.replay import replay
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.sim.check_step import Wrong

WORLD = 2


def made(layers: int = 2) -> tuple[Step, Plan]:
    step = step_of([Layer(rows=64)] * layers)
    return step, plan_step(step, stage=3, world_size=WORLD, bucket_size=64 * 4, prefetch=1, recompute="full")


STEP, PLAN = made()


@settings(deadline=None, max_examples=examples(30))
@given(
    rows=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    training=st.booleans(),
    stage=st.sampled_from([0, 1, 2, 3]),
    limit=st.integers(16, 400),
)
def test_every_plan_by_rule_passes_and_so_does_its_replay(
    rows: list[int], training: bool, stage: int, limit: int
) -> None:
    step = step_of([Layer(rows=n) for n in rows], training)
    plan = plan_step(step, stage=stage, world_size=WORLD, bucket_size=limit, prefetch=1, recompute="full")
    assert check_plan(step, plan) == []
    read = GivenPlan("plan.json", Plan.from_json(plan.to_json()))
    assert check_plan(step, replay(read, step)) == []


@settings(deadline=None, max_examples=examples(30))
@given(rows=st.lists(st.integers(2, 400), min_size=1, max_size=3), share=st.floats(0, 1))
def test_every_searched_plan_passes(rows: list[int], share: float) -> None:
    step = step_of([Layer(rows=n) for n in rows])
    constraints = Constraints("auto", WORLD, offload="auto")
    search = Search(step, constraints, machine_named("v100-32gb-dgx2"), work=300)
    assert check_plan(step, search.best[int(share * (len(search.best) - 1))].plan) == []


def bucket(place: int, **changes: object) -> Plan:
    buckets = list(PLAN.buckets)
    buckets[place] = replace(buckets[place], **changes)  # type: ignore[arg-type]
    return replace(PLAN, buckets=tuple(buckets))


def without(what: Callable[[object], bool]) -> Step:
    return replace(STEP, ops=tuple(op for op in STEP.ops if not what(op)))


def operation(name: str, **changes: object) -> Step:
    return replace(STEP, ops=tuple(replace(op, **changes) if op.name == name else op for op in STEP.ops))  # type: ignore[arg-type]


FIRST, SECOND = (b.params[0] for b in PLAN.buckets)


@pytest.mark.parametrize(
    ("step", "plan", "name", "message"),
    [
        (
            STEP,
            replace(PLAN, stage=1, buckets=bucket(0, placement=Placement("host", "host", "host")).buckets),
            "plan",
            "host",
        ),
        (STEP, bucket(1, index=5), "buckets", "has index 5 in place 1"),
        (STEP, bucket(1, params=()), "buckets", "is empty"),
        (STEP, bucket(1, params=(FIRST, SECOND)), "buckets", "blocks.0.weight is in buckets blocks.0 and blocks.1"),
        (STEP, bucket(1, tiles=60), "plan", "bucket blocks.1 has 60 tiles of 32 rows"),
        (STEP, bucket(1, params=()), "parameters", "parameter blocks.1.weight is not in the plan"),
        (
            STEP,
            bucket(1, params=(SECOND, replace(FIRST, name="x"))),
            "parameters",
            "x is in the plan, and the model does not read it",
        ),
        (
            STEP,
            bucket(1, params=(replace(SECOND, dtype="float16"),)),
            "parameters",
            "weight: dtype float16 in the plan, float32 here",
        ),
        (
            STEP,
            bucket(1, params=(replace(SECOND, tied_to=("head",)),)),
            "parameters",
            "other names ('head',) in the plan, () here",
        ),
        (STEP, replace(PLAN, recompute=("blocks.7",)), "layers", "blocks.7 is recomputed in the plan"),
        (STEP, replace(PLAN, offload=(("blocks.8", "host"),)), "layers", "blocks.8 leaves the device in the plan"),
        (STEP, replace(PLAN, save=("blocks.0:gone",)), "layers", "the step has no such activation"),
        (STEP, replace(PLAN, offload=(("blocks.0:gone", "host"),)), "layers", "the step has no such activation"),
        (operation("act0", reads=("d_out0",)), PLAN, "reads", "act0 reads d_out0, before it is made"),
        (operation("act0", reads=("nowhere",)), PLAN, "reads", "nowhere, which is neither an input nor made"),
        (operation("act0", writes=("up0",)), PLAN, "reads", "act0 makes up0, which is there"),
        (without(lambda op: op.name == "grad1"), PLAN, "reductions", "blocks.1.weight is reduced 0 times, not 1"),  # type: ignore[attr-defined]
        (operation("grad1", params=(FIRST.name,)), PLAN, "reductions", "blocks.0.weight is reduced 2 times, not 1"),
        (replace(STEP, training=False), PLAN, "reductions", "reduced 1 times, not 0"),
    ],
)
def test_what_is_broken_is_found(step: Step, plan: Plan, name: str, message: str) -> None:
    assert check_plan(STEP, PLAN) == []
    assert any(message in violation.message for violation in check_plan(step, plan) if violation.check == name)
    assert all(found.check == name and found.message for found in CHECKS[name][1](step, plan))


def test_single_activations_that_the_step_has_are_no_mistake() -> None:
    plan = replace(PLAN, save=("blocks.0:up", "blocks.1:act"), offload=(("blocks.0:up", "host"),))
    assert check_plan(STEP, plan) == []
    assert replay(GivenPlan("plan.json", plan), STEP) == plan
    with pytest.raises(ConfigError, match=r"blocks\.0:gone is saved in the plan, and the step has no such activation"):
        replay(GivenPlan("plan.json", replace(plan, save=("blocks.0:gone",))), STEP)


def test_an_error_names_the_operation_its_module_and_line() -> None:
    broken = operation("act0", reads=("d_out0",))
    assert check_plan(broken, PLAN) == [
        Wrong("reads", "act0 reads d_out0, before it is made", "blocks.0", "model.py:8", 2)
    ]
    with pytest.raises(InvariantError) as caught:
        require_plan(broken, PLAN, "look at it")
    text = str(caught.value)
    assert "reads: act0 reads d_out0, before it is made (at operation act0, blocks.0, model.py:8)" in text
    assert text.endswith("hint: look at it")


def test_an_error_is_short() -> None:
    with pytest.raises(InvariantError, match="and 5 more"):
        require_plan(STEP, replace(PLAN, recompute=tuple(f"gone.{i}" for i in range(10))), "")


def test_it_takes_milliseconds() -> None:
    step = step_of([Layer(padding=75)] * 48)  # as many operations as a traced GPT of 48 layers
    assert len(step.ops) > 7500
    plan = plan_step(step, stage=3, world_size=WORLD, bucket_size=2**20, prefetch=1)
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        assert check_plan(step, plan) == []
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 0.05  # 6 ms where nothing else runs


def test_a_transformer_passes() -> None:
    step = transformer(4, 64, 32)
    assert check_plan(step, plan_step(step, stage=3, world_size=8, bucket_size=2**16, prefetch=2)) == []
