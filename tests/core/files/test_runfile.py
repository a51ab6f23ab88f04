"""What a run measured is read back as it was, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plans import plan_file, run_of

from zerograph.core.errors import ConfigError
from zerograph.core.files.runfile import Run

RUN = run_of(plan_file(4, update=True))


def test_a_run_read_back_is_the_same() -> None:
    assert Run.from_json(RUN.to_json()) == RUN
    assert Run.from_json(RUN.to_json()).to_json() == RUN.to_json()


def test_it_names_its_plan_segments_and_buckets() -> None:
    data = json.loads(RUN.to_json())
    assert data["plan"] == plan_file(4).plan.digest
    assert data["segments"] == pytest.approx({"run's digest of forward": 0.01, "run's digest of backward": 0.02})
    assert list(data["gathers"]) == list(data["reduces"]) == ["0", "1", "2", "3"]
    assert data["update"] == pytest.approx(0.004)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "1", '{"spans": {}, "memory": {}, "peaks": {}}', plan_file().to_json()]
)
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the file holds no measured run|this is a plan, not a measured run"):
        Run.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "the measured run has version 7, this ZeroGraph reads 3"),
        ({"segments": {"a": "soon"}}, "incomplete: 'soon' are no seconds"),
        ({"gathers": {"0": -1.0}}, "incomplete: -1.0 are no seconds"),
        ({"reduces": {"first": 1.0}}, "incomplete: "),
        ({"update": True}, "incomplete: True are no seconds"),
        ({"moves": {"read shard 0": -1.0}}, "incomplete: -1.0 are no seconds"),
        ({"moves": None}, "incomplete: "),
        ({"spans": 1}, "incomplete: "),
    ],
)
def test_what_is_wrong_with_a_run_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Run.from_json(json.dumps({**json.loads(RUN.to_json()), **change}))
