"""`zerograph passes`: edits of each pass, and graphs before and after."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plans import plan_file

from zerograph.cli import main
from zerograph.compiler.pipeline import REWRITES


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["passes", *map(str, args)])


def test_a_line_for_each_pass(plan: Path) -> None:
    assert run(plan).stdout == (
        "graph    pass          edits\n"
        "joint    canonicalize      3\n"
        "forward  gather            4\n"
        "forward  prefetch          0\n"
    )


def test_without_a_plan_the_passes_there_are() -> None:
    header, *rows = run().stdout.splitlines()
    assert header.split() == ["stage", "pass", "does"]
    assert [row.split()[:2] for row in rows] == [[step.stage, step.name] for step in REWRITES]
    does = {row.split()[1]: row.split(maxsplit=2)[2] for row in rows}
    assert does["canonicalize"] == "Leave one marker per parameter and one reduction per gradient."
    assert does["return_loss_only"].startswith("Take out of Dynamo's graph gm what it returns beside its one loss")
    shown = json.loads(run("--json").stdout)["pipeline"]
    assert [step["name"] for step in shown] == [step.name for step in REWRITES]
    result = run("--diff")
    assert result.exit_code == 2 and "no plan is given" in result.stderr


def test_one_pass_or_one_graph(plan: Path) -> None:
    assert run(plan, "--pass", "gather").stdout.splitlines()[1:] == ["forward  gather      4"]
    assert len(run(plan, "--graph", "forward").stdout.splitlines()) == 3


def test_before_and_after(plan: Path) -> None:
    assert run(plan, "--diff", "--graph", "forward").stdout == (
        "forward, gather: 4 edits\n"
        "--- before\n+++ after\n@@ -1 +1 @@\n-unshard\n+gather\n"
        "\n"
        "forward, prefetch: 0 edits\n"
        "\n"
    )


def test_a_terminal_has_colours(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main.main(["passes", str(plan), "--diff"], standalone_mode=False)
    assert "\x1b[31m-unshard\x1b[0m" in out.getvalue() and "\x1b[32m+gather\x1b[0m" in out.getvalue()
    assert "\x1b[1m--- before\x1b[0m" in out.getvalue()


def test_json(plan: Path) -> None:
    assert json.loads(run(plan, "--json", "--pass", "canonicalize").stdout) == {
        "version": 1,
        "passes": [{"graph": "joint", "name": "canonicalize", "edits": 3, "diff": "-a\n+b\n"}],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--pass", "fuse"), "the plan tells of no pass 'fuse'"),
        (("--graph", "update"), "the plan tells of no graph 'update'"),
        (("--pass", "gather", "--graph", "joint"), "the plan tells of no pass 'gather' of graph 'joint'"),
    ],
)
def test_what_did_not_run(plan: Path, args: tuple[str, ...], message: str) -> None:
    result = run(plan, *args)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr
    assert "hint: passes: canonicalize, gather, prefetch; graphs: joint, forward\n" in result.stderr


def test_a_plan_without_passes(plan: Path) -> None:
    plan.write_text(replace(plan_file(4), passes=()).to_json())
    assert "the plan tells of no passes" in run(plan).stderr
