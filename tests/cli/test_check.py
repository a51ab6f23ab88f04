"""`zerograph check`: a line per check, and where the first violation is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planner.steps import Layer, step_of
from planner.test_offload import GPU, MIB, file_of, placed, ruled

from zerograph.cli import main
from zerograph.cli.check import SENTENCES
from zerograph.core.plan import Placement

STEP = step_of([Layer(rows=MIB, inside=4 * MIB)] * 3)
FILE = file_of(STEP, placed(ruled(STEP), Placement("host", "host", "host")), GPU)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(FILE.to_json())
    return path


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, args)])


def test_a_plan_that_holds(plan: Path) -> None:
    result = run(plan)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == len(SENTENCES) and all(line.startswith("ok ") for line in lines)


def test_less_memory_fails_with_instruction_module_and_line(plan: Path) -> None:
    result = run(plan, "--memory", "8MiB")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == [
        "failed  budget       device holds 16 MiB at 5.78181e-05 s, 8 MiB more than its budget of 8 MiB",
        "                     at task 4, forward blocks.0, blocks.0, model.py:8",
    ]
    assert run(plan, "--memory", "1GiB").exit_code == 0
    assert "ok      digest" in result.stdout


def test_a_file_changed_by_hand_is_checked_all_the_same(plan: Path) -> None:
    data = json.loads(plan.read_text())
    gathers = data["programs"]["programs"][1]["instructions"]["Gather"]
    gathers["reads"] = [[] for _ in gathers["reads"]]
    plan.write_text(json.dumps(data))
    result = run(plan)
    assert result.exit_code == 1
    assert "failed  digest       the content has digest " in result.stdout
    wrong = "backward instruction 1: gather blocks.2 does not read what the fetch of its shard wrote\n"
    assert f"failed  arrivals     {wrong}                     at blocks.2\n" in result.stdout
    assert "and 2 more (--json lists them)" in result.stdout


def test_json(plan: Path) -> None:
    assert json.loads(run(plan, "--json").stdout) == {
        "version": 1,
        "holds": True,
        "checks": [{"name": name, "holds": True, "what": text} for name, text in SENTENCES.items()],
        "violations": [],
    }
    result = run(plan, "--json", "--memory", "8MiB")
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["holds"] is False
    assert [check["name"] for check in data["checks"] if not check["holds"]] == ["budget"]
    violation = data["violations"][0]
    assert (violation["task"], violation["module"], violation["source"]) == (4, "blocks.0", "model.py:8")


def test_what_is_no_plan_is_a_wrong_call(plan: Path) -> None:
    plan.write_text("{}")
    result = run(plan)
    assert result.exit_code == 2 and result.stdout == ""
    assert f"error: {plan}: the file holds no plan\n\nhint: " in result.stderr
    assert "is not a size" in run(plan, "--memory", "much").stderr
    assert run(plan.parent / "none.json").exit_code == 2
