"""The trace that Perfetto opens: a row per stream, a counter per tier, arrows from gathers."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plans import beside, plan_file

from zerograph.cli.export import trace
from zerograph.core.files.planfile import PlanFile


def events(file: PlanFile, path: Path) -> dict[str, list[dict[str, Any]]]:
    trace.write(file, path)
    found = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        found[event["ph"]].append(event)
    return found


@pytest.mark.parametrize("offload", [False, True])
def test_every_instruction_is_a_slice_of_its_stream(tmp_path: Path, offload: bool) -> None:
    file = plan_file(4, offload=offload)
    found = events(file, tmp_path / "trace.json")
    rows = {e["tid"]: e["args"]["name"] for e in found["M"] if e["name"] == "thread_name"}
    assert list(rows.values())[:3] == ["compute", "gather", "reduce"] and len(rows) == (6 if offload else 3)
    assert [(e["name"], e["args"]["task"]) for e in found["X"]] == [(s.name, s.task) for s in file.forecast.spans]
    for event, span in zip(found["X"], file.forecast.spans, strict=True):
        assert event["ts"] == pytest.approx(span.start * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=2e-3)
    for row in rows:
        mine = [e for e in found["X"] if e["tid"] == row]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine)), "no overlap"


def test_a_counter_per_tier(tmp_path: Path) -> None:
    file = plan_file(4, offload=True)
    counters = events(file, tmp_path / "trace.json")["C"]
    for tier in ("device", "host"):
        values = [e["args"]["bytes"] for e in counters if e["name"] == f"{tier} memory"]
        assert values == [size for _, size in file.forecast.memory[tier]]  # type: ignore[index]


def test_arrows_lead_from_gathers_to_what_waits_for_them(tmp_path: Path) -> None:
    file = plan_file(4)
    found = events(file, tmp_path / "trace.json")
    assert len(found["s"]) == len(found["f"]) == 8

    def slice_at(event: dict[str, Any]) -> dict[str, Any]:
        return next(e for e in found["X"] if e["tid"] == event["tid"] and e["ts"] <= event["ts"] < e["ts"] + e["dur"])

    for start, end in zip(found["s"], found["f"], strict=True):
        assert start["id"] == end["id"] and end["bp"] == "e"
        gather, compute = slice_at(start), slice_at(end)
        assert gather["cat"] == "gather" and compute["cat"] == "compute"
        assert gather["args"]["module"] == compute["args"]["module"]
        assert gather["args"]["task"] in file.forecast.spans[compute["args"]["task"]].after


def test_a_run_and_the_forecast_with_its_seconds_are_processes_of_their_own(tmp_path: Path) -> None:
    file = plan_file(4, update=True)
    laid = beside(file, 2.0)
    trace.write(file, tmp_path / "trace.json", laid)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {1: f"one step of {file.model}", 2: f"{file.model}, re-timed", 3: f"{file.model}, measured"}
    for process, forecast in ((1, file.forecast), (2, laid.retimed), (3, laid.measured)):
        mine = [e for e in found if e["pid"] == process]
        slices = [(e["name"], e["ts"]) for e in mine if e["ph"] == "X"]
        assert slices == [(s.name, pytest.approx(s.start * 1e6, abs=1e-3)) for s in forecast.spans]
        assert len([e for e in mine if e["ph"] == "C"]) == len(forecast.memory["device"])
    arrows = [e["id"] for e in found if e["ph"] == "s"]
    assert len(set(arrows)) == len(arrows), "no arrow leads from one process to another"
