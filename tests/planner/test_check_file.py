"""What must be true of every plan: true of every simulated program, and found wherever it is broken.

Tests ``planner/check_tasks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import MIB, Task, plan_file, play

from zerograph.core.machine import TIERS, Tier, machine_named
from zerograph.core.plan import Plan
from zerograph.core.planfile import Holding, PlanFile
from zerograph.core.timeline import STREAMS, Forecast
from zerograph.planner.check import Violation
from zerograph.planner.check_file import CHECKS, check_file

FILE = plan_file(4, offload=True, update=True)


def with_forecast(**changes: object) -> PlanFile:
    return replace(FILE, forecast=replace(FILE.forecast, **changes))


def with_span(place: int, /, **changes: object) -> PlanFile:
    spans = list(FILE.forecast.spans)
    spans[place] = replace(spans[place], **changes)
    return with_forecast(spans=tuple(spans))


def only(file: PlanFile, name: str) -> Violation:
    """The one violation of that check; other checks may have noticed the same."""
    found = [violation for violation in check_file(file) if violation.check == name]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("layers", [1, 4, 12])
@pytest.mark.parametrize("offload", [False, True])
def test_nothing_is_wrong_with_a_plan(layers: int, offload: bool) -> None:
    assert check_file(plan_file(layers, offload=offload, update=True)) == []


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    """What the simulation makes of any program that gives back what it took."""
    tasks: list[Task] = []
    holdings = [Holding("shards", "param", "device", 7, -1, -1)]
    for index in range(draw(st.integers(0, 12))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        tier, size = draw(st.sampled_from(TIERS)), draw(st.integers(0, 50))
        holdings.append(Holding(f"memory of t{index}", "temporary", tier, size, index, index))
        stream, seconds = draw(st.sampled_from(STREAMS)), draw(st.floats(0, 5))
        tasks.append(Task(f"t{index}", stream, seconds, tuple(after)))
    return play(tasks, holdings)


def planned(forecast: Forecast) -> PlanFile:
    """A plan whose budget is exactly what it needs."""
    budget = {tier: peak.bytes for tier, peak in forecast.peaks.items()}
    return PlanFile("any", Plan(0, 1, (), 0), machine_named("cpu"), budget, forecast)


@given(forecasts())
def test_every_simulated_program_passes(forecast: Forecast) -> None:
    assert check_file(planned(forecast)) == []


@given(forecasts(), st.data())
def test_one_byte_less_is_found(forecast: Forecast, data: st.DataObject) -> None:
    file = planned(forecast)
    tier = data.draw(st.sampled_from(sorted(file.budget)))
    short = replace(file, budget={**file.budget, tier: file.budget[tier] - 1})
    assert [v.check for v in check_file(short)] == ["budget"]


def test_too_much_is_found_where_it_first_is() -> None:
    violation = only(replace(FILE, budget={**FILE.budget, "device": 100 * MIB}), "budget")
    assert violation.message == "device holds 102 MiB at 0.007 s, 2 MiB more than its budget of 100 MiB"
    assert FILE.forecast.spans[violation.task].name == "forward blocks.0"
    assert (violation.module, violation.source) == ("blocks.0", "model.py:40")


def test_a_task_without_a_source_line_has_that_of_what_it_takes() -> None:
    violation = only(replace(FILE, budget={**FILE.budget, "device": 110 * MIB}), "budget")
    assert FILE.forecast.spans[violation.task].name == "gather blocks.1"
    assert FILE.forecast.spans[violation.task].source == "" and violation.source == "model.py:41"


def test_too_much_before_the_step_is_about_no_task() -> None:
    violation = only(replace(FILE, budget={**FILE.budget, "host": 0}), "budget")
    assert violation.task == -1 and violation.message.startswith("host holds 192 MiB before the step")


def test_a_tier_without_a_budget_may_hold_nothing() -> None:
    assert "host holds" in only(replace(FILE, budget={"device": 8 * 2**30}), "budget").message


def test_a_stream_that_does_two_things_at_once() -> None:
    violation = only(with_span(8, end=1.0), "streams")
    assert violation.task == 11 and violation.module == "blocks.3" and violation.source == "model.py:40"
    assert "forward blocks.3 starts on compute at" in violation.message


def lower(tier: Tier, by: int) -> dict[Tier, tuple[tuple[float, int], ...]]:
    memory = dict(FILE.forecast.memory)
    return {**memory, tier: tuple((time, level - by) for time, level in memory[tier])}


def with_buckets(change: Callable[[tuple], tuple]) -> PlanFile:  # type: ignore[type-arg]
    return replace(FILE, plan=replace(FILE.plan, buckets=change(FILE.plan.buckets)))


def with_holding(**changes: object) -> PlanFile:
    return replace(FILE, holdings=(replace(Holding("x", "state", "device", 1, 0, 5, "m", "a.py:1"), **changes),))


PATH, PEAKS = FILE.forecast.critical_path, FILE.forecast.peaks


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        (with_forecast(memory={"host": ((0.0, 5), (1.0, -5))}, peaks=PEAKS), "memory", "host holds -5 B at 1 s"),
        (with_forecast(memory={"host": ((1.0, 5), (1.0, 6))}, peaks=PEAKS), "memory", "goes from 1 to 1 s"),
        (with_forecast(memory=lower("host", -MIB)), "peaks", "the peak of host is 192 MiB, its curve reaches 193 MiB"),
        (with_forecast(peaks={**PEAKS, "host": replace(PEAKS["host"], task=99)}), "peaks", "is in task 99 of"),
        (with_forecast(peaks={"device": PEAKS["device"]}), "peaks", "host holds memory and has no peak"),
        (with_span(3, task=7), "tasks", "fetch shard of blocks.1 is task 7 in place 3"),
        (with_span(3, start=9.0), "tasks", "fetch shard of blocks.1 runs from 9 s to"),
        (with_buckets(lambda b: (*b[:3], replace(b[3], params=b[0].params))), "buckets", "in buckets blocks.0 and"),
        (with_buckets(lambda b: (*b[:3], replace(b[3], params=()))), "buckets", "bucket blocks.3 is empty"),
        (with_buckets(lambda b: (*b[:3], replace(b[3], index=5))), "buckets", "has index 5 in place 3"),
        (with_holding(last=99), "holdings", "x on device is held from task 0 to 99"),
        (with_holding(first=-2), "holdings", "x on device is held from task -2"),
        (with_holding(first=6), "holdings", "to an earlier one, 5"),
        (with_holding(bytes=-1), "holdings", "x on device holds -1 B"),
        (with_forecast(critical_path=()), "critical path", "no critical path"),
        (with_forecast(critical_path=(99,)), "critical path", "task 99 of"),
        (with_forecast(critical_path=PATH[1:]), "critical path", "it begins with gather blocks.0"),
        (with_forecast(critical_path=PATH[:-1]), "critical path", "it ends with"),
        (with_forecast(critical_path=(*PATH[:2], *PATH[3:])), "critical path", "before it ends at"),
    ],
)
def test_what_is_broken_is_found(file: PlanFile, name: str, message: str) -> None:
    assert message in only(file, name).message


def test_every_check_is_about_itself() -> None:
    for name, (_, finder) in CHECKS.items():
        for broken in (with_span(3, start=9.0, task=7), with_holding(last=99), with_forecast(critical_path=())):
            assert {violation.check for violation in finder(broken)} <= {name}


@pytest.mark.parametrize("layers", [1, 3])
def test_a_computation_that_waits_for_no_gather_is_noticed(layers: int) -> None:
    file = plan_file(layers, update=True)
    gathers = {span.task for span in file.forecast.spans if span.stream == "gather"}
    for task in gathers:
        spans = [replace(s, after=tuple(a for a in s.after if a != task)) for s in file.forecast.spans]
        tampered = replace(file, forecast=replace(file.forecast, spans=tuple(spans)))
        found = [v for v in check_file(tampered) if v.check == "use"]
        assert [v.task for v in found] == [task]


def test_a_bucket_that_is_never_gathered_is_noticed() -> None:
    spans = tuple(replace(s, operation="compute") if s.operation == "gather" else s for s in FILE.forecast.spans)
    found = [v for v in check_file(with_forecast(spans=spans)) if v.check == "use"]
    assert {v.module for v in found} == {bucket.name for bucket in FILE.plan.buckets}


@given(st.data())
def test_waiting_for_a_later_task_is_noticed(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(FILE.forecast.spans) - 1))
    task = data.draw(st.integers(place, len(FILE.forecast.spans) + 3))
    assert only(with_span(place, after=(task,)), "waits").task == place


def test_starting_before_what_it_waits_for_has_ended_is_noticed() -> None:
    compute = next(span for span in FILE.forecast.spans if span.stream == "compute")
    gather = FILE.forecast.spans[compute.after[0]]
    found = only(with_span(compute.task, start=gather.end - 0.001), "waits")
    assert found.task == compute.task and "that it waits for ends at" in found.message


def test_a_step_without_the_optimizers_update_is_noticed() -> None:
    last = FILE.forecast.spans[-1]
    assert check_file(with_span(last.task, name="renamed")) == []
    assert "0 times, not once" in only(with_span(last.task, operation="compute"), "updates").message


def test_decisions_about_layers_that_are_not_there_are_found() -> None:
    plan = FILE.plan
    for changed in (
        replace(plan, recompute=("blocks.77",)),
        replace(plan, recompute=("blocks.77",), save=("blocks.77.mlp:mm",)),
        replace(plan, offload=(("blocks.77", "host"),)),
    ):
        found = [violation for violation in check_file(replace(FILE, plan=changed)) if violation.check == "layers"]
        assert found and all("blocks.77" in violation.message for violation in found)


def of_tokens(file: PlanFile) -> list[str]:
    return [violation.message for violation in check_file(file) if violation.check == "tokens"]


def test_tasks_in_other_tiles_of_tokens_than_the_plan_says_are_found() -> None:
    spans = list(FILE.forecast.spans)
    head = next(i for i, span in enumerate(spans) if span.stream == "compute") + 1
    spans.insert(head, replace(spans[head - 1], name="forward head", module="head", token_tiles=4))
    file = replace(FILE, forecast=replace(FILE.forecast, spans=tuple(spans)))
    tiled = replace(FILE.plan, loss_tiles=4, head="head:mm")
    assert of_tokens(replace(file, plan=tiled)) == []
    assert of_tokens(file) == ["forward head runs in 4 tiles of tokens, the plan has 1"]
    lost = "head:mm is in {} tiles of tokens, and no task makes one"
    assert of_tokens(replace(FILE, plan=tiled)) == [lost.format(4)]
    other = of_tokens(replace(file, plan=replace(tiled, loss_tiles=8)))
    assert other == ["forward head runs in 4 tiles of tokens, the plan has 8", lost.format(8)]


def test_layers_in_other_tiles_of_tokens_than_the_plan_says_are_found() -> None:
    layer = "blocks.1"
    spans = [
        replace(span, token_tiles=3) if (span.module, span.stream) == (layer, "compute") else span
        for span in FILE.forecast.spans
    ]
    file = replace(FILE, forecast=replace(FILE.forecast, spans=tuple(spans)))
    tiled = replace(FILE.plan, recompute=(layer,), token_tiles=3, token_regions=(f"{layer}.mlp:mm",))
    assert of_tokens(replace(file, plan=tiled)) == []
    assert of_tokens(file) == [
        f"{phase} {layer} runs in 3 tiles of tokens, the plan has 1" for phase in ("forward", "backward")
    ]
    (lost,) = of_tokens(replace(FILE, plan=tiled))
    assert lost == f"{layer}.mlp:mm is in 3 tiles of tokens, and no task makes one"
