"""Plan files survive JSON, and refuse what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_file

from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.machine import PRESETS


@pytest.mark.parametrize("offload", [False, True])
def test_a_file_read_back_equals_itself(offload: bool) -> None:
    file = plan_file(offload=offload)
    again = PlanFile.from_json(file.to_json())
    assert again == file and again.to_json() == file.to_json()
    assert json.loads(file.to_json())["digest"] == file.digest


def test_a_hundred_layers_stay_small() -> None:
    assert len(plan_file(100).to_json()) < 250_000


def test_texts_that_repeat_are_written_once() -> None:
    spans = json.loads(plan_file(100).to_json())["spans"]
    assert spans["stream"]["of"] == ["gather", "compute", "reduce"]
    assert len(spans["stream"]["at"]) == len(spans["task"]) == 500
    assert isinstance(spans["name"], list)  # each task has its own


@given(st.lists(st.sampled_from(["", "blocks.1", "model.py:40", "[]", "\N{DEGREE SIGN}"])))
def test_any_texts_survive(modules: list[str]) -> None:
    file = plan_file(1)
    held = tuple(Holding(str(at), "activation", "device", 1, 0, 0, module) for at, module in enumerate(modules))
    assert PlanFile.from_json(replace(file, holdings=held).to_json()).holdings == held


def test_what_is_held_during_a_task() -> None:
    file = plan_file(2)
    peak = file.forecast.peaks["device"]
    time = file.forecast.spans[peak.task].start
    held = sum(h.bytes for h in file.holdings if h.held_at(time, file.forecast.spans))
    assert peak.bytes == pytest.approx(held, rel=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [], "holds no plan"),
        (lambda d: {**d, "version": 99}, "version 99"),
        (lambda d: {**d, "tokens": 1}, "was changed"),
    ],
)
def test_other_files_are_refused(change: object, message: str) -> None:
    data = json.loads(plan_file().to_json())
    with pytest.raises(ConfigError, match=message):
        PlanFile.from_json(json.dumps(change(data)))  # type: ignore[operator]


def test_what_was_changed_by_hand_can_be_read_where_that_is_the_point() -> None:
    data = {**json.loads(plan_file().to_json()), "tokens": 1}
    assert PlanFile.from_json(json.dumps(data), verify=False) == replace(plan_file(), tokens=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(budget={"device": "8GiB"}),
        lambda data: data.update(budget=[1]),
        lambda data: data.update(critical_path=["a"]),
        lambda data: data["spans"]["start"].__setitem__(0, "soon"),
        lambda data: data["holdings"]["last"].__setitem__(0, None),
        lambda data: data["peaks"]["device"].update(bytes="much"),
    ],
)
def test_what_is_no_number_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(plan_file(4).to_json())
    change(data)
    with pytest.raises(ConfigError, match="the plan is incomplete"):
        PlanFile.from_json(json.dumps(data), verify=False)


def test_utilization_is_relative_to_what_the_vendor_publishes() -> None:
    file = replace(plan_file(), machine=PRESETS["a100-80gb"])
    assert file.plan.compute_dtype == "float32"
    assert file.peak_flops == 19.5e12
    assert file.model_flops_utilization == pytest.approx(file.flops / 19.5e12 / file.forecast.seconds)
    measured = replace(file.machine, published={})
    assert replace(file, machine=measured).peak_flops == measured.matmul["float32"]
