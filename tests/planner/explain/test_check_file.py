"""What must be true of every plan file, found wherever it is broken; of its programs ``core/test_check*`` has more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.steps import Layer, step_of
from planner.test_offload import GPU, MIB, file_of, placed, ruled

from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.planner.explain.check_file import CHECKS, check_file
from zerograph.planner.search.constraints import PLACEMENTS
from zerograph.sim.check_step import Wrong

STEP = step_of([Layer(rows=MIB, stream=MIB)] * 4)
FILE = file_of(STEP, placed(ruled(STEP), PLACEMENTS[-1]), GPU)
MORE = Holding("more", "state", "device", 1, 0, 99)
PEAK = FILE.forecast.peaks["device"]


def with_forecast(**changes: Any) -> PlanFile:
    return replace(FILE, forecast=replace(FILE.forecast, **changes))


def with_span(place: int, /, **changes: Any) -> PlanFile:
    spans = list(FILE.forecast.spans)
    spans[place] = replace(spans[place], **changes)
    return with_forecast(spans=tuple(spans))


def only(file: PlanFile) -> Wrong:
    """The one violation."""
    (found,) = check_file(file)
    assert found.check in CHECKS
    return found


def test_nothing_is_wrong_with_a_plan() -> None:
    assert check_file(FILE) == [] == check_file(PlanFile.from_json(FILE.to_json()))


@given(st.sampled_from(sorted(FILE.budget)))
def test_one_byte_less_is_found(tier: str) -> None:
    short = replace(FILE, budget={**FILE.budget, tier: FILE.budget[tier] - 1})  # type: ignore[index]
    assert only(short).check == "budget"


def test_too_much_is_found_where_it_first_is() -> None:
    violation = only(replace(FILE, budget={**FILE.budget, "device": PEAK.bytes - 1}))
    assert violation.message.startswith("device holds ") and "1 B more than its budget of" in violation.message
    assert (violation.task, violation.module) == (PEAK.task, PEAK.module)
    assert violation.source == "model.py:8"


def test_too_much_before_the_step_is_about_no_task() -> None:
    violation = only(replace(FILE, budget={**FILE.budget, "nvme": 0}))
    assert violation.task == -1 and "before the step" in violation.message


def test_a_tier_without_a_budget_may_hold_nothing() -> None:
    assert "host holds" in only(replace(FILE, budget={t: b for t, b in FILE.budget.items() if t != "host"})).message


def with_buckets(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> PlanFile:
    return replace(FILE, plan=replace(FILE.plan, buckets=change(FILE.plan.buckets)))


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        (with_buckets(lambda b: (*b[:3], replace(b[3], params=b[0].params))), "buckets", "in buckets blocks.0 and"),
        (with_buckets(lambda b: (*b[:3], replace(b[3], params=()))), "buckets", "bucket blocks.3 is empty"),
        (with_buckets(lambda b: (*b[:3], replace(b[3], index=5))), "buckets", "has index 5 in place 3"),
        (replace(FILE, plan=replace(FILE.plan, stage=1)), "plan", "does not shard"),
        (replace(FILE, programs=()), "updates", "blocks.0 is updated on the host 0 times, not 1"),
        (replace(FILE, programs=FILE.programs[1:]), "reads", "which is not there"),
        (replace(FILE, programs=FILE.programs[1:]), "forecast", "are not simulated"),
        (with_span(3, start=9.0), "forecast", "from 9 s to"),
        (with_span(3, after=(1,)), "forecast", "and the programs run"),
        (with_span(3, operation="compute"), "forecast", "and the programs run"),
        (with_forecast(spans=FILE.forecast.spans[:-1]), "forecast", "nothing is forecast, and the programs run"),
        (with_forecast(memory={**FILE.forecast.memory, "host": ((0.0, -5),)}), "forecast", ", at other moments"),
        (with_forecast(peaks={**FILE.forecast.peaks, "device": replace(PEAK, bytes=1)}), "forecast", "up to 1 B, and"),
        (with_forecast(critical_path=FILE.forecast.critical_path[1:]), "forecast", "critical path is not that"),
        (replace(FILE, holdings=FILE.holdings[:-1]), "forecast", "what is held is not what"),
        (
            replace(FILE, holdings=(*FILE.holdings, Holding("x", "state", "device", 1, 0, 99))),
            "forecast",
            "what is held",
        ),
        (replace(FILE, machine=replace(GPU, launch=2 * GPU.launch)), "forecast", "and the programs run"),
    ],
)
def test_what_is_broken_is_found(file: PlanFile, name: str, message: str) -> None:
    found = [violation.message for violation in check_file(file) if violation.check == name]
    assert any(message in text for text in found), found
