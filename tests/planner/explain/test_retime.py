"""A plan re-timed: the same tasks with a run's seconds, and only of a run of that very plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import programmed, run_of

from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Run
from zerograph.core.machine import machine_named
from zerograph.planner.explain.retime import retimed, tasks_of

FILE = programmed(4)


@settings(deadline=None)
@given(st.integers(1, 5), st.booleans())
def test_with_its_own_seconds_a_forecast_is_itself(layers: int, offload: bool) -> None:
    file = programmed(layers, offload)
    found, before = retimed(file, run_of(file, 1.0)), file.forecast
    assert {t: peak.bytes for t, peak in found.peaks.items()} == {t: peak.bytes for t, peak in before.peaks.items()}
    assert [s.start for s in found.spans] == pytest.approx([s.start for s in before.spans])
    assert [s.key for s in found.spans] == [s.key for s in before.spans]
    if offload:
        return  # moves that end at one moment may change places by a rounded bit
    assert found.peaks == before.peaks and found.critical_path == before.critical_path
    assert {t: [size for _, size in c] for t, c in found.memory.items()} == {
        t: [size for _, size in c] for t, c in before.memory.items()
    }


def test_slow_gathers_of_one_bucket_hold_up_what_waits_for_them() -> None:
    run = run_of(FILE, 1.0)
    slow = replace(run, measured=replace(run.measured, gathers={**run.measured.gathers, 2: 1.0}))
    slower = retimed(FILE, slow)
    seconds = {span.task: span.end - span.start for span in slower.spans}
    for span in FILE.forecast.spans:
        longer = span.name == "gather blocks.2"
        assert seconds[span.task] == pytest.approx(1.0 if longer else span.end - span.start)
    assert slower.seconds > 2.0 > 1.0 > FILE.forecast.seconds


def test_collectives_between_hosts_keep_compute_waiting_for_as_long_as_was_measured() -> None:
    """A run has the seconds in which they did: these do not hide behind compute once more."""
    file = programmed(4, machine=replace(machine_named("cpu"), ranks_per_node=1))
    run = run_of(file, 1.0)
    gathers = dict.fromkeys(run.measured.gathers, 0.5)
    found = retimed(file, replace(run, measured=replace(run.measured, gathers=gathers)))
    computing = sum(span.end - span.start for span in found.spans if span.stream == "compute")
    assert found.seconds >= 8 * 0.5 + computing


def test_every_task_finds_its_spans() -> None:
    run = run_of(FILE)
    found = tasks_of(FILE, run)
    assert list(found) == [span.task for span in FILE.forecast.spans]
    for span in FILE.forecast.spans:
        assert sum(s.end - s.start for s in found[span.task]) == pytest.approx(2 * (span.end - span.start))
        assert len(found[span.task]) == (1 if span.stream == "compute" else 2)
        assert found[span.task][0].start == pytest.approx(2 * span.start)


def test_moves_and_updates_off_the_device_have_their_own_seconds() -> None:
    file = programmed(4, offload=True)
    run = run_of(file, 1.0)
    slow = replace(run, measured=replace(run.measured, moves=run.measured.moves | {"update states 2": 1.0}))
    longer = [span.name for span in retimed(file, slow).spans if span.end - span.start > 0.5]
    assert longer == ["update blocks.2"]
    # What a run has not timed, as moves between host and device, takes what the plan says.
    untold = replace(run, measured=replace(run.measured, moves={}))
    starts = [span.start for span in file.forecast.spans]
    assert [span.start for span in retimed(file, untold).spans] == pytest.approx(starts)


def test_all_transfers_of_a_move_are_its_task() -> None:
    file = programmed(4, offload=True)
    run = run_of(file)
    (fetch,) = [s for s in run.forecast.spans if s.name == "fetch shard of blocks.1" and s.phase == "forward"]
    second = replace(fetch, task=len(run.forecast.spans), start=fetch.end, end=fetch.end + 1.0)
    twice = replace(run, forecast=replace(run.forecast, spans=(*run.forecast.spans, second)))
    found = tasks_of(file, twice)
    tasks = {(s.name, s.phase): s.task for s in file.forecast.spans}
    assert found[tasks["fetch shard of blocks.1", "forward"]] == [fetch, second]
    assert len(found[tasks["fetch shard of blocks.1", "backward"]]) == 1


def test_updates_of_all_optimizers_are_one_task() -> None:
    run = run_of(FILE)
    (update,) = [span for span in run.forecast.spans if span.name == "optimizer update"]
    second = replace(update, task=len(run.forecast.spans), start=update.end, end=update.end + 1.0)
    twice = replace(run, forecast=replace(run.forecast, spans=(*run.forecast.spans, second)))
    (task,) = [span.task for span in FILE.forecast.spans if span.name == "optimizer update"]
    assert tasks_of(FILE, twice)[task] == [update, second]


def cut(run: Run) -> Run:
    spans = tuple(s for s in run.forecast.spans if s.name != "forward blocks.2")
    return replace(run, forecast=replace(run.forecast, spans=spans))


def wider(run: Run) -> Run:
    spans = tuple(replace(s, flops=2 * s.flops) for s in run.forecast.spans)
    return replace(run, forecast=replace(run.forecast, spans=spans))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (FILE, lambda run: replace(run, plan="0123"), "the run is one of plan 0123, and this is plan "),
        (FILE, lambda run: replace(run, device="cuda"), "the run was on cuda, and the plan is for cpu"),
        (replace(FILE, machine=machine_named("gh200")), lambda run: replace(run, device="cpu"), "plan is for gh200"),
        (FILE, cut, "the run has 7 segments and the plan 8; the first that differs is forward blocks.2"),
        (FILE, wider, "forward blocks.0 has 1000000000 operations in the plan and 2000000000 in the run"),
        (FILE, lambda run: replace(run, measured=replace(run.measured, gathers={})), "the run has no gather blocks.0"),
        (FILE, lambda run: replace(run, measured=replace(run.measured, segments={})), "has no seconds of the segment"),
        (
            replace(
                FILE, forecast=replace(FILE.forecast, spans=tuple(replace(s, key="") for s in FILE.forecast.spans))
            ),
            lambda run: run,
            "forecast from its schedule",
        ),
    ],
)
def test_what_is_no_run_of_the_plan_is_refused(file: PlanFile, change: Callable[[Run], Run], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        retimed(file, change(run_of(FILE)))
