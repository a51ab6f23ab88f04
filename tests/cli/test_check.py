"""`zerograph check`: a line per check, and where the first violation is."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from zerograph.cli import main
from zerograph.cli.check import SENTENCES


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, args)])


def test_a_plan_that_holds(plan: Path) -> None:
    result = run(plan)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == len(SENTENCES) and all(line.startswith("ok ") for line in lines)


def test_less_memory_fails_with_instruction_module_and_line(plan: Path) -> None:
    result = run(plan, "--memory", "80MiB")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == [
        "failed  budget         device holds 102 MiB at 0.003 s, 22 MiB more than its budget of 80 MiB",
        "                       at task 2, gather blocks.1, blocks.1, model.py:41",
    ]
    assert run(plan, "--memory", "1GiB").exit_code == 0
    assert "ok      digest" in result.stdout


def test_a_file_changed_by_hand_is_checked_all_the_same(plan: Path) -> None:
    data = json.loads(plan.read_text())
    data["holdings"]["last"][1] = 99
    data["holdings"]["last"][2] = 99
    plan.write_text(json.dumps(data))
    result = run(plan)
    assert result.exit_code == 1
    assert "failed  digest         the content has digest " in result.stdout
    assert (
        "failed  holdings       blocks.0.weight on device is held from task 0 to 99, the step has 21" in result.stdout
    )
    assert "at task 0, gather blocks.0, blocks.0, model.py:40\n" in result.stdout
    assert "and 1 more (--json lists them)" in result.stdout


def test_json(plan: Path) -> None:
    assert json.loads(run(plan, "--json").stdout) == {
        "version": 1,
        "holds": True,
        "checks": [{"name": name, "holds": True, "what": text} for name, text in SENTENCES.items()],
        "violations": [],
    }
    result = run(plan, "--json", "--memory", "80MiB")
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["holds"] is False
    assert [check["name"] for check in data["checks"] if not check["holds"]] == ["budget"]
    violation = data["violations"][0]
    assert (violation["task"], violation["module"], violation["source"]) == (2, "blocks.1", "model.py:41")


def test_what_is_no_plan_is_a_wrong_call(plan: Path) -> None:
    plan.write_text("{}")
    result = run(plan)
    assert result.exit_code == 2 and result.stdout == ""
    assert f"error: {plan}: the file holds no plan\n\nhint: " in result.stderr
    assert "is not a size" in run(plan, "--memory", "much").stderr
    assert run(plan.parent / "none.json").exit_code == 2
