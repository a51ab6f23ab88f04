"""The kinds of a tier's memory add up to its curve, at every instant and at the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, profile_of, step_of
from plans import MIB, Task, plan_file, play
from quick import examples

from zerograph.cli.view.levels import levels
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.machine import TIERS, machine_named
from zerograph.core.plan import Placement
from zerograph.core.timeline import STREAMS
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.sim.rates import Rates

KINDS = ("param", "gathered", "activation", "gradient", "state", "temporary", "input")


def assert_adds_up(file: PlanFile) -> None:
    assert file.forecast.memory
    for tier, curve in file.forecast.memory.items():
        kinds, rest = levels(file, tier)
        assert rest == [0] * len(curve)
        assert [sum(parts) for parts in zip(*kinds.values(), strict=True)] == [size for _, size in curve]
        assert all(size >= 0 for level in kinds.values() for size in level)


@st.composite
def files(draw: st.DrawFn) -> PlanFile:
    """Any tasks, of which some take no time and some wait for others, and any memory that they hold."""
    seconds = st.sampled_from([0.0, 0.1, 0.25, 1.0])
    count = draw(st.integers(1, 12))
    tasks = []
    for i in range(count):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        tasks.append(Task(f"task {i}", draw(st.sampled_from(STREAMS)), draw(seconds), after))
    held = [Holding("there", "param", "device", 7, -1, -1)]
    for i in range(draw(st.integers(0, 12))):
        first = draw(st.integers(-1, count - 1))
        last = draw(st.sampled_from([-1, *range(max(first, 0), count)]))
        kind, tier = draw(st.sampled_from(KINDS)), draw(st.sampled_from(TIERS))
        held.append(Holding(f"held {i}", kind, tier, draw(st.integers(1, 100)), first, last))
    made = tuple(draw(st.permutations(held)))
    forecast = play(tasks, [h for h in made if lasts(tasks, h)])
    return replace(plan_file(1), forecast=forecast, holdings=tuple(h for h in made if lasts(tasks, h)))


def lasts(tasks: list[Task], holding: Holding) -> bool:
    """Whether what holds it last ends after what held it first began: streams run side by side."""
    if -1 in (holding.first, holding.last):
        return True
    spans = play(tasks).spans
    return spans[holding.last].end >= spans[holding.first].start


@given(file=files())
def test_kinds_add_up_at_every_instant(file: PlanFile) -> None:
    assert_adds_up(file)


@settings(max_examples=examples(20), deadline=None)
@given(
    layers=st.lists(st.builds(Layer, rows=st.sampled_from([1024, MIB])), min_size=1, max_size=4),
    placement=st.sampled_from([Placement(), Placement("device", "host", "nvme"), Placement("host", "host", "host")]),
    stage=st.sampled_from([1, 2, 3]),
    training=st.booleans(),
)
def test_kinds_of_planned_steps_add_up(layers: list[Layer], placement: Placement, stage: int, training: bool) -> None:
    step, machine = step_of(layers, training=training), machine_named("h100-80gb")
    plan = plan_step(step, stage=stage, world_size=4, bucket_size=MIB, prefetch=1)
    plan = replace(plan, buckets=tuple(replace(b, placement=placement) for b in plan.buckets))
    rates = Rates(machine, 4, plan.compute_dtype)
    params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
    forecast, holdings = forecast_plan(Scheduler(profile_of(step, plan), params, names, rates), plan)
    file = PlanFile("any", plan, machine, {}, forecast, holdings)
    assert_adds_up(file)
    if not training:
        assert "gradient" not in levels(file, "device")[0], "an evaluation has none"


def test_what_no_holding_explains_is_left_over() -> None:
    file = plan_file(3, offload=True)  # it does not tell of what its fetches fill
    kinds, rest = levels(file, "device")
    assert set(kinds) == {"param", "gathered", "activation"}
    assert min(rest) == 0 < max(rest) and all(size % (12 * MIB) == 0 for size in rest), "shards of 12 MiB each"
    sums = [sum(parts) for parts in zip(rest, *kinds.values(), strict=True)]
    assert sums == [size for _, size in file.forecast.memory["device"]]


@pytest.mark.parametrize("layers", [1, 4])
def test_a_file_that_names_nothing(layers: int) -> None:
    file = replace(plan_file(layers), holdings=())
    assert levels(file, "device") == ({}, [size for _, size in file.forecast.memory["device"]])
