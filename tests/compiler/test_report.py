"""What a backend prints of itself: a line for each fact, and no more than there is to say."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline

from zerograph.compiler.report import BucketReport, RecordedStep, Report

REPORT = Report(
    stage=3,
    world_size=2,
    transport="shared memory",
    buckets=(BucketReport(0, "blocks.0", ("blocks.0.weight", "blocks.0.bias"), 3 * 2**20, "use"),),
    programs=2,
    segments=8,
    distinct_segments=3,
    compile_seconds=1.25,
    graph_breaks={},
    runs={"forward": 5, "backward": 5},
    peak_whole_buckets=2,
)


def test_the_text() -> None:
    assert_expected_inline(
        str(REPORT),
        """\
ZeroGraph stage 3 on 2 ranks, shared memory
  2 programs, 8 segments of which 3 distinct, compiled in 1.2 s
  runs: 5 forward, 5 backward; at most 2 buckets whole at a time
  frame 0  blocks.0                            2 parameters      3 MiB  use""",
    )


def test_a_backend_that_has_not_run_yet() -> None:
    idle = replace(REPORT, buckets=(), programs=0, segments=0, distinct_segments=0, runs={})
    assert "runs: none yet" in str(idle) and len(str(idle).splitlines()) == 3


def test_what_is_on_nvme_is_reported_by_kind() -> None:
    offloaded = replace(REPORT, on_nvme={"gradients": 2**20, "optimizer states": 2**21}, slots=2**22)
    line = "  on NVMe: gradients 1 MiB, optimizer states 2 MiB; updates stream through 4 MiB of memory"
    assert str(offloaded).splitlines()[3] == line


def test_of_a_graph_break_the_first_line_is_shown() -> None:
    broken = replace(REPORT, graph_breaks={"print() was called\n  at model.py:3": 2})
    assert str(broken).splitlines()[-1] == "  graph break x2 in this process: print() was called"


def test_a_recorded_step_stands_beside_its_forecasts() -> None:
    recorded = RecordedStep(
        seconds=0.2, forecast_seconds=0.3, retimed_seconds=0.15, machine="cpu", peak=2 * 2**20, forecast_peak=3 * 2**20
    )
    line = (
        "recorded step 0.200 s; forecast 0.300 s (+50%) by the rates of cpu, 0.150 s (-25%) by its own seconds; "
        "peak 2 MiB, forecast 3 MiB (+50%)"
    )
    assert str(recorded) == line
    assert f"  {line}" in str(replace(REPORT, recorded=recorded)).splitlines()
