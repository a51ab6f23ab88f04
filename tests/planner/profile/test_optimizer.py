"""Updates as operations: they say what tasks of updates do, and nothing is counted because of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, of_kinds, step_of
from quick import examples

from zerograph.core.instructions import Update
from zerograph.core.machine import machine_named
from zerograph.core.step import Step
from zerograph.planner import plan_step
from zerograph.planner.profile.optimizer import with_updates
from zerograph.planner.profile.regions import profile
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.rates import Rates
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search

KINDS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3)


def mixed(kinds: Sequence[tuple[bool, bool]]) -> Step:
    return of_kinds(step_of([Layer(rows=64 + i) for i in range(len(kinds))], updates=False), kinds)


@settings(deadline=None, max_examples=examples(30))
@given(kinds=KINDS, world=st.sampled_from([1, 2, 5]), moments=st.integers(0, 2))
def test_tasks_take_as_long_as_operations_say(kinds: list[tuple[bool, bool]], world: int, moments: int) -> None:
    step = with_updates(mixed(kinds).over(world), moments)
    plan = plan_step(step, stage=3, world_size=world, bucket_size=1, prefetch=1)
    rates = Rates(machine_named("h100-80gb"), world, "float32")
    buckets, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
    programs = coarse_programs(Scheduler(profile(step), buckets, names, rates, moments), plan)
    (update,) = [task for program in programs for task in program.instructions if isinstance(task, Update)]
    assert rates.seconds(update, ()) == pytest.approx(
        sum(rates.machine.update.seconds(op.moved) for op in step.updates)
    )
    assert [op.params[0] for op in step.updates] == [p.name for p in step.params if p.trainable]


@settings(deadline=None, max_examples=examples(30))
@given(kinds=KINDS)
def test_nothing_is_counted_twice(kinds: list[tuple[bool, bool]]) -> None:
    bare = mixed(kinds).over(2)
    step = with_updates(bare, 2)
    assert profile(step) == profile(bare)
    assert sum(op.flops for op in step.ops) == sum(op.flops for op in bare.ops)
    constraints, machine = Constraints("auto", 2), machine_named("cpu")
    assert [c.plan for c in Search(step, constraints, machine).best] == [
        c.plan for c in Search(bare, constraints, machine).best
    ]


def test_an_update_reads_the_shard_its_gradient_and_states_and_writes_all_but_the_gradient() -> None:
    step = with_updates(step_of([Layer(rows=64)], updates=False).over(2), 1)
    (update,) = step.updates
    aliases = {value.name: value.alias_of for value in step.values}
    assert update.reads == ("shard0", "grad0", "states of blocks.0.weight")
    assert [aliases[name] for name in update.writes] == ["shard0", "states of blocks.0.weight"]
    assert (update.module, update.phase, step.ops[-1]) == ("blocks.0", "update", update)


def test_plain_gradient_descent_has_no_states_and_an_evaluation_no_updates() -> None:
    (update,) = with_updates(step_of([Layer(rows=64)], updates=False).over(2), 0).updates
    assert update.reads == ("shard0", "grad0")
    assert with_updates(step_of([Layer(rows=64)], training=False, updates=False).over(2), 2).updates == ()
