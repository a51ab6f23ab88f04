"""`zerograph show`: summary, sparklines, collapsed tables, one moment, and JSON.

Tests ``cli/view/collapsing.py``, ``cli/view/groups.py``, ``cli/view/moment.py``, ``cli/view/summary.py`` and
``cli/view/tables.py``.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_file, programmed, run_of

from zerograph.cli import main
from zerograph.cli.show import EXPORTS
from zerograph.cli.view.collapsing import collapse_rows, collapsed_name, short_source, skeleton
from zerograph.cli.view.drawing import ASCII_BLOCKS, BLOCKS, bar, sparkline
from zerograph.cli.view.groups import grouped
from zerograph.cli.view.moment import START, find_task, moment
from zerograph.core.files.planfile import Holding, PlanFile, Reason
from zerograph.core.machine import machine_named
from zerograph.core.step import layer_of


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return written(tmp_path / "plan.json", plan_file(12, offload=True))


def written(path: Path, file: PlanFile) -> Path:
    path.write_text(file.to_json())
    return path


def run(*args: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["show", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def data(*args: str | Path) -> dict:  # type: ignore[type-arg]
    return json.loads(run(*args, "--json").stdout)


def test_the_screen(tmp_path: Path) -> None:
    screen = run(written(tmp_path / "plan.json", plan_file(4))).stdout
    assert (
        screen
        == """\
model        model.py:make
plan         stage 3, 2 ranks, 4 buckets, prefetch 1
machine      cpu
step         67 ms, 15,284 tokens/s, MFU 66.3% of 0.09 TFLOP/s measured
exposed      7 ms of communication (10.4% of the step)
bound by     60 ms of compute, 4 ms of reduce, 3 ms of gather
why          stage 3: the user asked for it
not counted  allocator fragmentation

device  ▅▅▇▇▇▇▇█████████████████████████████████████████▆▆▆▆▆▆▆▆▆▄▄▄   120 MiB of 8 GiB (1.5%)
        peak at gather blocks.3 during forward blocks.3 (model.py:40)
          48 MiB param shards
          24 MiB gathered blocks.3.weight (blocks.3 model.py:40)
          24 MiB gathered blocks.3.weight (blocks.3 model.py:40)
          others: 24 MiB activation

compute  ██████████████████░░  89.6%  60 ms
gather   ███████░░░░░░░░░░░░░  35.8%  24 ms
reduce   █████░░░░░░░░░░░░░░░  23.9%  16 ms

Bytes at the peak of each tier and time on all streams, of each where alike:
layer                           device   time  why it is here
blocks.0 .. blocks.2 (3 alike)   6 MiB  25 ms  use: stage 3 frees parameters after each use
blocks.3                        54 MiB  25 ms  use: stage 3 frees parameters after each use
shards                          48 MiB
"""
    )


def test_what_a_task_outside_of_layers_holds_is_in_its_row(tmp_path: Path) -> None:
    file = plan_file(4)
    peak = file.forecast.peaks["device"].task
    nodes = tuple(Holding(name, "activation", "device", 2**20, peak, peak) for name in ("mm", "convert_element_type_7"))
    rows = data(written(tmp_path / "plan.json", replace(file, holdings=(*file.holdings, *nodes))))["rows"]
    before = data(written(tmp_path / "plan.json", file))["rows"]
    assert [row["name"] for row in rows] == [row["name"] for row in before]
    assert sum(row["bytes"].get("device", 0) for row in rows) == 2 * 2**20 + sum(
        row["bytes"].get("device", 0) for row in before
    )


def test_layers_that_are_alike_are_one_row(plan: Path) -> None:
    assert run(plan).stdout.splitlines()[-6:] == [
        "layer                              device     host   time  why it is here",
        "blocks.0 .. blocks.7 (8 alike)      6 MiB           43 ms  use: stage 3 frees parameters after each use",
        "blocks.8 .. blocks.9 (2 alike)     30 MiB           43 ms  use: stage 3 frees parameters after each use",
        "blocks.10 .. blocks.11 (2 alike)                    43 ms  use: stage 3 frees parameters after each use",
        "shards                            144 MiB",
        "optimizer states                           576 MiB",
    ]


@pytest.mark.parametrize(
    ("by", "line"),
    [
        ("kind", "gathered     48 MiB"),
        ("tier", "host             576 MiB  state 576 MiB"),
        (
            "op",
            "backward blocks.11 .. blocks.0 (12 alike)                   10 ms  compute     model.py:42, ...",
        ),
        (
            "op",
            "gather blocks.0 .. blocks.11 (12 alike)             48 MiB   6 ms  gather x2   ",
        ),
    ],
)
def test_other_rows(plan: Path, by: str, line: str) -> None:
    assert any(shown.startswith(line) for shown in run(plan, "--by", by).stdout.splitlines())


def test_the_largest_first(plan: Path) -> None:
    lines = run(plan, "--top", "2").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[-4:]] == ["layer", "optimizer states", "shards", "and 3 smaller"]
    assert run(plan, "--at", "16", "--top", "1").stdout.splitlines()[-2:] == [
        "host  576 MiB  state  optimizer states  always",
        "and 3 smaller",
    ]
    assert run(plan, "--by", "op", "--top", "1").stdout.splitlines()[-2].startswith("backward blocks.11 ..")


def test_a_moment(plan: Path) -> None:
    lines = run(plan, "--at", "16").stdout.splitlines()
    assert lines[:3] == [
        "task 16, gather blocks.5, on gather (blocks.5), 27 ms into the step",
        "device holds 258 MiB of 8 GiB, 36 MiB of it not told apart",
        "host holds 576 MiB of 16 GiB",
    ]
    assert "device   24 MiB  gathered    blocks.4.weight .. blocks.5.weight (2 alike)" in lines[6]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("108", "no task 108: the plan has 108"),
        ("gather blocks.5", "2 tasks are called 'gather blocks.5': 16 gather blocks.5, "),
        ("forward", "12 tasks are called 'forward': 2 forward blocks.0, 5 forward"),
        ("nothing", "no task is called 'nothing'"),
    ],
)
def test_a_moment_that_is_none(plan: Path, task: str, message: str) -> None:
    result = run(plan, "--at", task, code=2)
    assert message in result.stderr and "hint: " in result.stderr and not result.stdout


def test_a_moment_of_a_run_is_not_known(plan: Path) -> None:
    assert "give one of them" in run(plan, "--at", "1", "--measured", plan, code=2).stderr


def test_a_name_that_only_one_task_has_in_it() -> None:
    file = plan_file(12)
    assert file.forecast.spans[find_task(file, "forward blocks.1")].name == "forward blocks.1"
    assert file.forecast.spans[find_task(file, "orward blocks.11")].name == "forward blocks.11"


def test_json(plan: Path) -> None:
    printed = data(plan)
    assert printed["version"] == 1 and printed["by"] == "layer"
    assert printed["peaks"]["host"] == {
        "bytes": 576 * 2**20, "task": -1, "name": "the start of the step", "module": "", "source": "",
    }  # fmt: skip
    assert sum(row["count"] for row in printed["rows"]) == 14
    assert printed["rows"][0] == {
        "name": "blocks.0", "last": "blocks.7", "count": 8, "bytes": {"device": 6 * 2**20}, "tasks": 9,
        "seconds": pytest.approx(0.043), "measured": None, "stream": "", "source": "",
        "why": "use: stage 3 frees parameters after each use",
    }  # fmt: skip
    assert "measured" not in printed and "at" not in printed
    assert printed["reasons"][0] == {"subject": "plan", "decision": "stage 3", "why": "the user asked for it"}


def test_json_of_a_moment(plan: Path) -> None:
    at = data(plan, "--at", "16")["at"]
    assert (at["task"], at["name"]) == (16, "gather blocks.5")
    named = sum(h["bytes"] for h in at["holdings"] if h["tier"] == "device")
    assert named + at["not_told_apart"]["device"] == at["levels"]["device"]


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Path, Path]:
    """A plan of what can run, and a run of it that took twice as long."""
    file = programmed(12)
    (tmp_path / "run.json").write_text(run_of(file).to_json())
    return written(tmp_path / "plan.json", file), tmp_path / "run.json"


def test_a_measured_run_beside_the_forecast(measured: tuple[Path, Path]) -> None:
    plan, path = measured
    screen = run(plan, "--measured", path).stdout
    assert "step      789 ms (1.58 s measured, x2.00)" in screen
    assert "re-timed  1.58 s (1.58 s measured, x1.00), 336 MiB of device, with the run's segments" in screen
    assert "336 MiB measured, x1.00" in screen
    assert "85.9%   678 ms  1.36 s measured, x2.00" in screen
    printed = data(plan, "--measured", path, "--by", "op")
    assert printed["measured"]["seconds"] == pytest.approx(2 * printed["seconds"])
    assert printed["retimed"]["seconds"] == pytest.approx(2 * printed["seconds"])
    assert printed["retimed"]["peaks"] == printed["peaks"]
    assert printed["rows"][0]["measured"] == pytest.approx(2 * printed["rows"][0]["seconds"])


def test_a_run_of_another_plan_is_refused(measured: tuple[Path, Path]) -> None:
    plan, path = measured
    file = programmed(12)
    other = replace(file, plan=replace(file.plan, prefetch=2))
    path.write_text(run_of(other).to_json())
    said = run(plan, "--measured", path, code=2).stderr
    assert f"the run is one of plan {other.plan.digest}, and this is plan {file.plan.digest}" in said
    assert "hint: record a run of this plan" in said


def test_exports_show_the_run_too(measured: tuple[Path, Path], tmp_path: Path) -> None:
    plan, path = measured
    names = [name for name, (_, _, _, takes_a_run) in EXPORTS.items() if takes_a_run]
    assert names == ["html", "svg", "trace", "dot", "graphml"]
    for name in names:
        run(plan, "--measured", path, f"--{name}", tmp_path / name)
        run(plan, f"--{name}", tmp_path / f"{name} alone")
        assert "measured" in (tmp_path / name).read_text()
        assert (tmp_path / name).read_text() != (tmp_path / f"{name} alone").read_text()
    said = run(plan, "--measured", path, "--memory-viz", tmp_path / "out", code=2).stderr
    assert "--memory-viz draws tensors, and --measured is of a run, which tells only their sum" in said
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused(plan: Path) -> None:
    other = plan.with_name("run.json")
    other.write_text('{"spans": 1}')
    assert "the file holds no measured run\n\nhint: " in run(plan, "--measured", other, code=2).stderr


def test_a_plan_of_nothing_can_be_shown(tmp_path: Path) -> None:
    file = plan_file(1)
    empty = replace(file, forecast=replace(file.forecast, spans=(), critical_path=(), memory={}, peaks={}), holdings=())
    path = written(tmp_path / "plan.json", empty)
    for by in ("layer", "kind", "tier", "op"):
        assert "stage 3" in run(path, "--by", by).stdout
    assert data(path)["rows"] == []


def test_an_export_that_cannot_be_written(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []

    def write(file: PlanFile, path: Path) -> None:
        files.append(path)
        path.write_text(file.model)

    for module, function, _, _ in EXPORTS.values():
        fake = sys.modules.get(f"zerograph.cli.export.{module}") or type(sys)(module)
        monkeypatch.setitem(sys.modules, f"zerograph.cli.export.{module}", fake)
        monkeypatch.setattr(fake, function, write, raising=False)
    out, other = plan.with_name("out"), plan.with_name("other")
    assert run(plan, "--memory-viz", out, "--graphml", other).stderr == f"wrote {out}\nwrote {other}\n"
    assert files == [out, other] and out.read_text() == "model.py:make"
    assert "error: cannot write" in run(plan, "--dot", plan.parent / "no" / "out", code=2).stderr


def test_ascii_where_the_output_has_no_blocks(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner(charset="ascii").invoke(main, ["show", str(plan)])
    assert result.exit_code == 0 and result.stdout.isascii()
    assert "compute     ##################..  89.6%" in result.stdout


def test_a_narrow_terminal_has_notes_below_their_rows(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    main.main(["show", str(plan)], standalone_mode=False)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    at = lines.index("blocks.0 .. blocks.7 (8 alike)      6 MiB           43 ms")
    assert lines[at + 1] == "  use: stage 3 frees parameters after each use"


def test_it_starts_at_once_and_without_anything_heavy(tmp_path: Path) -> None:
    path = written(tmp_path / "plan.json", plan_file(100, offload=True))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        command = [sys.executable, "-X", "importtime", "-m", "zerograph", "show", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        seconds.append(time.perf_counter() - begin)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "zerograph.cli.view.tables" in imported
    assert not imported & {"torch", "numpy", "networkx", "sympy", "rich", "psutil", "zerograph.planner"}
    assert min(seconds) < 1.0, f"0.2 s on an idle machine, here {min(seconds):.2f} s at best"


# What is drawn, collapsed and held, for any input.

curves = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**12)), min_size=1, max_size=30).map(
    lambda points: [(0.0, points[0][1]), *sorted(points)]
)


@given(curves, st.integers(1, 80), st.sampled_from([BLOCKS, ASCII_BLOCKS]))
def test_a_sparkline_is_as_wide_as_given_and_shows_the_peak(
    curve: list[tuple[float, int]], width: int, blocks: str
) -> None:
    line = sparkline(curve, 1.0, width, blocks)
    assert len(line) == width and set(line) <= set(blocks)
    before_the_end = max(level for at, level in curve if at < 1.0)
    assert (blocks[-1] in line) is (before_the_end > 0)


def test_memory_of_a_gpu_outside_of_the_allocator_is_named(tmp_path: Path) -> None:
    on_gpu = written(tmp_path / "plan.json", replace(plan_file(4), machine=machine_named("h100-80gb")))
    assert "outside of torch's allocator: driver's context 426 MiB, NCCL's buffers 576 MiB" in run(on_gpu).stdout
    assert data(on_gpu)["outside"] == {"driver's context": 426 * 2**20, "NCCL's buffers": 576 * 2**20}
    on_cpu = written(tmp_path / "cpu.json", plan_file(4))
    assert "outside of" not in run(on_cpu).stdout and data(on_cpu)["outside"] == {}


def test_a_sparkline_of_steps() -> None:
    assert sparkline([(0.0, 8), (0.5, 0), (0.75, 4)], 1.0, 4) == "██ ▄"
    assert sparkline([(0.0, 0), (0.49, 1), (0.5, 0)], 1.0, 2) == "█ "
    assert sparkline([], 0.0, 3) == "   "


@given(st.floats(-1, 2), st.integers(0, 50))
def test_a_bar_is_never_longer_than_given(share: float, width: int) -> None:
    assert len(bar(share, width)) == width


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(0, 2))))
def test_collapsing_keeps_every_row_in_order(rows: list[tuple[str, int, int]]) -> None:
    collapsed = collapse_rows(rows, lambda r: f"{r[0]}.{r[1]}", lambda x, y: x[2] == y[2])
    assert [row for group in collapsed for row in group] == rows
    for group in collapsed:
        assert len({(name, value) for name, _, value in group}) == 1


@pytest.mark.parametrize(
    ("name", "layer", "bare"),
    [
        ("blocks.3.mlp.0", "blocks.3", "blocks.#.mlp.#"),
        ("transformer.h.11", "transformer.h.11", "transformer.h.#"),
        ("layer1.0.conv2", "layer1.0", "layer1.#.conv2"),
        ("0.weight", "0", "#.weight"),
        ("lm_head", "lm_head", "lm_head"),
        ("gather blocks.3", "gather blocks.3", "gather blocks.#"),
    ],
)
def test_names_of_layers(name: str, layer: str, bare: str) -> None:
    assert (layer_of(name) or name) == layer and skeleton(name) == bare


def test_long_paths_are_cut_in_tables() -> None:
    assert short_source("model.py:40") == "model.py:40"
    assert short_source("/usr/lib/python3/dist-packages/models/llama/modeling.py:31") == "llama/modeling.py:31"


def test_a_collapsed_name_says_leading_words_once() -> None:
    assert collapsed_name("gather blocks.0", "gather blocks.3", 4) == "gather blocks.0 .. blocks.3 (4 alike)"
    assert collapsed_name("lm_head", "lm_head", 1) == "lm_head"


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_held_is_never_more_than_the_tier_holds(offload: bool) -> None:
    file = plan_file(6, offload=offload)
    for task in range(START, len(file.forecast.spans)):
        at = moment(file, task)
        for tier in at.levels:
            assert at.unnamed(tier) >= 0
            assert offload or at.unnamed(tier) == 0


def test_the_most_important_reason_is_shown_and_the_others_counted() -> None:
    reasons = (Reason("blocks.0.mlp.weight", "keep", "1 ms"), Reason("blocks.1", "keep", "2 ms"))
    file = replace(plan_file(2), reasons=(*reasons, Reason("blocks.0", "use", "other"), reasons[0]))
    rows = {rows[0].name: rows[0].why for rows in grouped(file, "layer")}
    assert rows["blocks.0"] == "keep: 1 ms (and 1 more)" and rows["blocks.1"] == "keep: 2 ms"


def test_no_file_is_written_over_another_one_of_the_call(plan: Path, tmp_path: Path) -> None:
    before, link, page = plan.read_text(), tmp_path / "link", tmp_path / "page"
    link.symlink_to(plan)
    for option in EXPORTS:
        assert f"--{option} would write over PLAN" in run(plan, f"--{option}", link, code=2).stderr
    assert "--html would write over --svg" in run(plan, "--svg", page, "--html", page, code=2).stderr
    record = tmp_path / "run.json"
    record.write_text("")
    assert "--html would write over --measured" in run(plan, "--measured", record, "--html", record, code=2).stderr
    assert plan.read_text() == before and not page.exists()
