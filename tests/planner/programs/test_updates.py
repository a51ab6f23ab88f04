"""The optimizer's update as instructions, behind a backward and beside the next forward."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
from planner.steps import Layer, profile_of, step_of

from zerograph.core.machine import machine_named
from zerograph.core.plan import Homes, Plan
from zerograph.core.program import Gather
from zerograph.core.timeline import Forecast, Span
from zerograph.planner.programs.forecasts import forecast_sketch
from zerograph.planner.programs.rates import Rates
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.programs.sketch import settled, sketch
from zerograph.sim.check import check_programs

GPU = machine_named("h100-80gb")
LAYERS, ROWS, LOSS = 6, 2**22, 4
FIRST, LAST = attrgetter("first"), attrgetter("last")
HOST, GRADIENTS, NVME = Homes("device", "device", "host"), Homes("host", "host", "host"), Homes("nvme", "nvme", "nvme")


def plan_of(homes: Homes, overlap: str, tiles: int = 1) -> tuple[Scheduler, Plan]:
    """A plan whose layers compute for longer than any of them is updated."""
    step = step_of([Layer(rows=ROWS, flops=2 * 10**10)] * LAYERS)
    plan = plan_step(step, stage=3, world_size=4, bucket_size=2**20, prefetch=1, overlap=overlap)  # type: ignore[arg-type]
    plan = replace(plan, buckets=tuple(replace(b, homes=homes, tiles=tiles) for b in plan.buckets))
    params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
    return Scheduler(profile_of(step, plan), params, names, Rates(GPU, 4, plan.compute_dtype)), plan


def forecast(homes: Homes, overlap: str, tiles: int = 1) -> Forecast:
    return forecast_sketch(*plan_of(homes, overlap, tiles))[0]


def updates(found: Forecast) -> list[Span]:
    return [span for span in found.spans if span.stream == "cpu_update"]


@pytest.mark.parametrize("homes", [HOST, GRADIENTS, NVME], ids=str)
@pytest.mark.parametrize("tiles", [1, 3])
def test_each_gather_waits_for_the_update_of_its_bucket(homes: Homes, tiles: int) -> None:
    found = forecast(homes, "forward", tiles)
    first = {(s.bucket, s.tile): s for s in reversed(found.spans) if s.operation == "gather" and s.phase == "forward"}
    assert len(updates(found)) == len(first) == LAYERS * tiles
    for update in updates(found):
        behind = [s for s in found.spans if s.what in ("states", "parameters") and s.phase == "forward"]
        last = max(s.end for s in behind if (s.bucket, s.tile) == (update.bucket, update.tile))
        assert first[update.bucket, update.tile].start >= last >= update.end


@pytest.mark.parametrize("homes", [HOST, GRADIENTS], ids=str)
def test_only_what_nothing_computes_beside_takes_time(homes: Homes) -> None:
    """The first layer waits for its update, and the others find theirs done: in the forward nothing else waits."""
    after, beside = forecast(homes, "none"), forecast(homes, "forward")
    each = [s.end - s.start for s in updates(after)]
    assert [s.end - s.start for s in updates(beside)] == pytest.approx(each)
    assert beside.seconds == pytest.approx(after.seconds - sum(each) + each[0], rel=0.01)
    assert beside.seconds < 0.95 * after.seconds


@pytest.mark.parametrize("homes", [HOST, GRADIENTS, NVME], ids=str)
def test_gradients_of_the_step_before_are_held_until_they_are_used(homes: Homes) -> None:
    scheduler, plan = plan_of(homes, "forward")
    programs = settled(sketch(scheduler, plan))
    assert check_programs(programs, plan) == []
    found, holdings = forecast_sketch(scheduler, plan)
    gradients = [h for h in holdings if h.kind == "gradient" and h.name.startswith("gradient of") and h.first == -1]
    assert len(gradients) == LAYERS
    assert {h.tier for h in gradients} == {homes.spilled}
    assert all(0 <= h.last < max(s.task for s in found.spans if s.phase == "forward") for h in gradients)
    # As much is there behind the step as before it, and the loss.
    for tier in found.memory:
        before, behind = (sum(h.bytes for h in holdings if h.tier == tier and at(h) == -1) for at in (FIRST, LAST))
        assert behind - before == (LOSS if tier == "device" else 0)


def test_programs_that_gather_before_the_update_are_found() -> None:
    scheduler, plan = plan_of(GRADIENTS, "forward")
    programs = list(settled(sketch(scheduler, plan)))
    programs[0] = replace(programs[0], given=programs[0].given[1:])
    (wrong,) = {each.check for each in check_programs(programs, plan)}
    assert wrong == "reads"
    kept = tuple(each for each in programs[0].instructions if each.operation != "update")
    programs[0] = replace(programs[0], instructions=kept)
    assert {"updates", "reads"} <= {each.check for each in check_programs(programs, plan)}
    assert any(isinstance(each, Gather) for each in kept)


def test_states_on_the_device_hide_behind_nothing() -> None:
    assert forecast(Homes(), "forward").seconds == forecast(Homes(), "none").seconds


def test_an_update_on_the_device_beside_a_forward_is_no_plan() -> None:
    _, plan = plan_of(GRADIENTS, "forward")
    assert list(replace(plan, update="device").mistakes())
    assert list(replace(plan, overlap="sideways").mistakes()) == ["updates beside 'sideways'"]  # type: ignore[arg-type]
