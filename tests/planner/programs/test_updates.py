"""The optimizer's update as instructions, behind a backward and beside the next forward."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
from planner.steps import Layer, step_of
from planner.test_offload import GPU, placed, ruled, scheduler_of

from zerograph.core.files.programs_data import programs_data, programs_of
from zerograph.core.plan import Homes, Overlap, Plan
from zerograph.core.timeline import Forecast, Span
from zerograph.planner.programs.forecasts import forecast_sketch
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.programs.sketch import settled, sketch
from zerograph.sim.check import check_programs

LAYERS, ROWS, LOSS = 6, 2**22, 4
FIRST, LAST = attrgetter("first"), attrgetter("last")
HOST, GRADIENTS, NVME = Homes("device", "device", "host"), Homes("host", "host", "host"), Homes("nvme", "nvme", "nvme")


def plan_of(homes: Homes, overlap: Overlap, tiles: int = 1, *, training: bool = True) -> tuple[Scheduler, Plan]:
    """A plan whose layers compute for longer than any of them is updated."""
    step = step_of([Layer(rows=ROWS, flops=2 * 10**10)] * LAYERS, training=training)
    plan = replace(placed(ruled(step), homes, tiles), overlap=overlap)
    return scheduler_of(step, plan, GPU), plan


def forecast(homes: Homes, overlap: Overlap, tiles: int = 1) -> Forecast:
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
        last = max(s.end for s in behind if s.bucket == update.bucket)  # of all its tiles: a parameter waits as one
        assert all(first[update.bucket, tile].start >= last >= update.end for tile in range(tiles))


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


@pytest.mark.parametrize("homes", [HOST, GRADIENTS, NVME, Homes("device", "device", "nvme")], ids=str)
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_gather_that_waits_for_no_update_is_found(homes: Homes, tiles: int) -> None:
    """Each end of each update is taken from what reads it."""
    scheduler, plan = plan_of(homes, "forward", tiles)
    forward, *rest = settled(sketch(scheduler, plan))
    ends = {r for each in forward.instructions for r in each.writes if forward.contents[r].name.startswith("end of ")}
    assert len(ends) >= LAYERS * tiles
    for end in ends:
        early = [
            replace(each, reads=tuple(r for r in each.reads if r != end)) if end in each.reads else each  # type: ignore[call-arg]
            for each in forward.instructions
        ]
        found = check_programs([replace(forward, instructions=early), *rest], plan)
        assert {each.check for each in found} == {"overlap"}
        assert all("does not wait for" in each.message for each in found)


def test_updates_stand_where_the_plan_has_them() -> None:
    beside, behind = (plan_of(GRADIENTS, overlap) for overlap in ("forward", "none"))
    for (scheduler, plan), (_, other), text in (
        (beside, behind, "is beside the forward, and the plan has none there"),
        (behind, beside, "is not beside the forward"),
    ):
        found = check_programs(settled(sketch(scheduler, plan)), other)
        assert {each.check for each in found} == {"overlap"} and all(text in each.message for each in found)


def test_registers_that_are_given_are_there_once_and_read() -> None:
    scheduler, plan = plan_of(GRADIENTS, "forward")
    forward, *rest = programs = settled(sketch(scheduler, plan))
    assert {w.check for w in check_programs([replace(forward, given=forward.given[1:]), *rest], plan)} == {"reads"}
    read = {register for each in forward.instructions for register in each.reads}
    unread = next(at for at in range(len(forward.contents)) if at not in read)
    (wrong, *_) = check_programs([replace(forward, given=(*forward.given, unread)), *rest], plan)
    assert "nothing reads it" in wrong.message
    for given in ([*forward.given, forward.given[0]], [float(forward.given[0])], [True], [len(forward.contents)]):
        data = programs_data(programs)
        data["programs"][0]["given"] = given
        with pytest.raises(ValueError, match="the forward is given registers that are not there, or one twice"):
            programs_of(data)
    data = programs_data(programs)
    data["programs"][1]["given"] = [forward.given[0]]
    with pytest.raises(ValueError, match="which only the first program of a step is"):
        programs_of(data)


def test_an_inference_updates_nothing() -> None:
    (forward,) = sketch(*plan_of(GRADIENTS, "forward", training=False))
    assert not forward.given and not any(each.operation == "update" for each in forward.instructions)


def test_states_on_the_device_hide_behind_nothing() -> None:
    assert forecast(Homes(), "forward").seconds == forecast(Homes(), "none").seconds


def test_an_update_on_the_device_beside_a_forward_is_no_plan() -> None:
    _, plan = plan_of(GRADIENTS, "forward")
    assert list(replace(plan, update="device").mistakes())
    assert list(replace(plan, overlap="sideways").mistakes()) == ["updates beside 'sideways'"]  # type: ignore[arg-type]
