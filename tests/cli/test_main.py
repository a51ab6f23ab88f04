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
from zerograph.core.errors import ConfigError, RankError, ZeroGraphError
from zerograph.core.machine import PRESETS

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
    words = [str(plan) if arg == "PLAN" else arg for arg in args]
    run = zerograph_process(*words, python=("-X", "importtime"))
    assert run.returncode in (0, 1), run.stderr  # the file has no programs, which check finds wrong
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
        (["bnech"], "No such command 'bnech'. Did you mean 'bench'?", "zerograph --help"),
        (["shwo"], "No such command 'shwo'. Did you mean 'show'?", "zerograph --help"),
        (["plan", "--stge", "3"], "'--stage'", "zerograph plan --help"),
        (["estimate", "--batch", "1.5"], "'1.5' is not a whole number", "zerograph estimate --help"),
        (["estimate", "--memory", "70"], "'70' has no unit: '70GiB', ", "zerograph estimate --help"),
        (["estimate", "--memory", "0GiB"], "there must be some memory", "zerograph estimate --help"),
        (["plan", "--memory", "70"], "'70' has no unit: '70GiB', ", "zerograph plan --help"),
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


@pytest.mark.parametrize("command", [["show", "PLAN"], ["show", "PLAN", "--json"], ["estimate", "--params", "7B"]])
def test_a_full_disk_is_no_mistake_of_ours(plan: Path, command: list[str]) -> None:
    words = [str(plan) if word == "PLAN" else word for word in command]
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "zerograph", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert run.returncode == 1 and run.stderr.startswith("error: No space left on device"), run.stderr


MISTAKEN = [
    (["estimate", "--params", "7B", "--machine", "PLAN"], "this is a plan, not a machine"),
    (["plan", "--params", "7B", "--machine", "CONFIG"], "this is the config of a Hugging Face model, not a machine"),
    (["show", "MACHINE"], "this is a machine, not a plan"),
    (["diff", "PLAN", "CONFIG"], "this is the config of a Hugging Face model, not a plan"),
    (["show", "PLAN", "--measured", "PLAN"], "this is a plan, not a measured run"),
    (["estimate", "MACHINE"], "this is a machine, not the config of a Hugging Face model"),
    (["plan", "PLAN"], "this is a plan, not the config of a Hugging Face model"),
    (["estimate", "--params", "7B", "--machine", "FOLDER"], "cannot read"),
    (["estimate", "--params", "7B", "--machine", "EMPTY"], "the file holds no machine"),
    (["check", "EMPTY"], "the file holds no plan"),
    (["passes", "DEEP"], "the file holds no plan"),
    (["estimate", "--params", "7B", "--machine", "DEEP"], "the file holds no machine"),
]


@pytest.mark.parametrize(("args", "shown"), MISTAKEN, ids=[" ".join(args) for args, _ in MISTAKEN])
def test_a_file_of_another_kind_is_reported_for_what_it_is(plan: Path, args: list[str], shown: str) -> None:
    texts = {
        "MACHINE": PRESETS["cpu"].to_json(),
        "CONFIG": '{"model_type": "llama"}',
        "EMPTY": "",
        "DEEP": "[" * 100_000,
    }
    paths = {"PLAN": plan, "FOLDER": plan.parent, **{name: plan.parent / f"{name}.json" for name in texts}}
    for name, text in texts.items():
        paths[name].write_text(text)
    result = CliRunner().invoke(main, [str(paths.get(word, word)) for word in args])
    named = paths[next(word for word in reversed(args) if word in paths)]
    assert result.exit_code == 2 and result.stdout == ""
    assert shown in result.stderr and str(named) in result.stderr and "\n\nhint: " in result.stderr
