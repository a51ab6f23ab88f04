"""The command line itself: how fast it starts, what it imports, how it fails."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import zerograph
from zerograph.cli import COMMANDS, main
from zerograph.errors import ConfigError, RankError, ZeroGraphError

HEAVY = {"torch", "numpy", "networkx", "sympy", "rich", "psutil", "zerograph.planner", "zerograph.runtime"}


def zerograph_process(*args: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-m", "zerograph", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_starts_at_once() -> None:
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        assert zerograph_process("--help").returncode == 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 1.0, f"0.2 s on an idle machine, here {min(seconds):.2f} s at best"


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        *((name, "--help") for name in ("doctor", "bench", "show", "diff", "passes")),
        ("bnech",),
    ],
)
def test_what_computes_nothing_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    run = zerograph_process(*args, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "zerograph.cli" in imported
    assert not imported & HEAVY


PLANNED = {"check", "estimate"}  # these ask the planner, which is plain Python


@pytest.mark.parametrize(
    "args",
    [
        *((name, "PLAN") for name in ("show", "check", "passes")),
        ("diff", "PLAN", "PLAN"),
        ("check", "--help"),
        ("estimate", "--help"),
        ("estimate", "--params", "7B"),
    ],
    ids=" ".join,
)
def test_reading_a_plan_imports_nothing_heavy_either(args: tuple[str, ...], plan: Path) -> None:
    told = [str(plan) if arg == "PLAN" else arg for arg in args]
    run = zerograph_process(*told, python=("-X", "importtime"))
    assert run.returncode == 0, run.stderr
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "zerograph.cli.options" in imported  # the command itself comes through importlib, which tells no times
    assert not imported & (HEAVY - {"zerograph.planner"} if args[0] in PLANNED else HEAVY)


def test_help_names_every_command_as_the_command_does() -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=120)
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"{name} " in result.stdout and line in result.stdout
        command = main.get_command(click.Context(main), name)
        assert command is not None and command.get_short_help_str(200) == line


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"zerograph {zerograph.__version__}\n")


def test_without_a_command_the_help_is_an_error() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2 and result.stdout == ""
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["bnech"], "No such command 'bnech'", "zerograph --help"),
        (["--jsno"], "No such option '--jsno'", "zerograph --help"),
        (["bench", "--world", "0"], "0 is not in the range x>=1", "zerograph bench --help"),
    ],
)
def test_a_wrong_call_exits_with_2_and_a_hint(args: list[str], message: str, hint: str) -> None:
    result = CliRunner().invoke(main, args, prog_name="zerograph")
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.endswith(f"\n\nhint: {hint}\n")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[CliRunner]:
    """``zerograph fail`` raises what the environment variable ERROR names, or returns 1."""
    errors = {
        "config": ConfigError("sizes are off", "say 1"),
        "rank": RankError("rank 1 ended"),
        "stop": KeyboardInterrupt,
    }

    @click.command()
    @click.argument("what")
    def fail(what: str) -> int:
        if what in errors:
            raise errors[what]
        return 1

    module = types.ModuleType("zerograph_failing")
    module.fail = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zerograph_failing", module)
    monkeypatch.setitem(COMMANDS, "fail", ("zerograph_failing:fail", "Fail."))  # type: ignore[arg-type]
    return CliRunner


def run(what: str) -> Result:
    return CliRunner().invoke(main, ["fail", what])


@pytest.mark.usefixtures("failing")
def test_our_errors_are_a_message_and_a_hint() -> None:
    assert (run("config").exit_code, run("config").stderr) == (2, "error: sizes are off\n\nhint: say 1\n")
    assert (run("rank").exit_code, run("rank").stderr) == (1, "error: rank 1 ended\n")


@pytest.mark.usefixtures("failing")
def test_a_command_may_return_its_exit_code() -> None:
    assert run("nothing").exit_code == 1


@pytest.mark.usefixtures("failing")
def test_interrupted() -> None:
    assert run("stop").exit_code == 130


@pytest.mark.usefixtures("failing")
def test_debugging_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGRAPH_DEBUG", "1")
    assert isinstance(run("config").exception, ZeroGraphError)
