"""The command: rows, exit codes, JSON, and where it writes.

Tests ``cli/estimate_view.py``.
"""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from zerograph.cli import main
from zerograph.core.machine import machine_named
from zerograph.dryrun.largest_fit import largest_by_stage
from zerograph.planner.estimate.estimate import Question, Row, estimate_rows

SMALL = "--params 1B --layers 16 --hidden 2048 --vocab 32k --world 8"
LLAMA = "--params 70B --layers 80 --hidden 8192 --vocab 128k --seq 4096"


_TABLES: dict[str, tuple[Row, ...]] = {}


def _estimated(question: Question) -> tuple[Row, ...]:
    """The rows are simulated once in a process: many commands differ in what they show of them."""
    key = repr(question)
    if key not in _TABLES:
        _TABLES[key] = estimate_rows(question)
    return _TABLES[key]


@functools.cache
def run(line: str) -> Result:
    """The result of a command, which runs once in a process: the same words give the same answer."""
    with patch("zerograph.cli.estimate.estimate_rows", _estimated):
        return CliRunner().invoke(main, ["estimate", *line.split()])


def test_a_row_per_stage_and_offload_with_the_fastest_marked() -> None:
    result = run(f"{LLAMA} --world 8 --machine h100-80gb")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert len(lines) == 1 + 4 + 2 * 6
    # Gradients go to the host with the optimizer: of two equal rows the first is marked.
    assert [line for line in lines if line.startswith("*")] == [
        line for line in lines if "3, optimizer on host" in line
    ]
    assert "no: device" in lines[1]


def test_memory_outside_of_the_allocator_is_named() -> None:
    """Of a GPU whose whole memory is known; not where users say how much tensors may take."""
    line = f"{LLAMA} --world 8 --machine h100-80gb"
    named = "outside of torch's allocator: driver's context 426 MiB, NCCL's buffers 576 MiB; 6% of each"
    assert named in run(line).stderr
    assert json.loads(run(f"{line} --json").stdout)["outside"] == {
        "driver's context": 426 * 2**20, "NCCL's buffers": 2 * 24 * 12 * 2**20,
    }  # fmt: skip
    assert "outside of" not in run(f"{line} --memory 70GiB").stderr + run(f"{SMALL} --machine cpu").stderr


def test_check_exits_with_1_and_says_why_when_nothing_fits() -> None:
    line = f"{LLAMA} --tier device --memory 70GiB"
    result = run(f"{line} --check")
    assert result.exit_code == 1
    assert "nothing fits: stage 3 needs 1.03 TiB of device memory per rank, has 65.8 GiB" in result.stderr
    assert "hint: stage 3, parameters on host" in result.stderr
    assert "nothing fits" not in result.stdout
    assert run(line).exit_code == 0
    assert run(f"{LLAMA} --world 8 --check").exit_code == 0


def test_json_holds_what_the_table_shows() -> None:
    result = run(f"{LLAMA} --world 8 --json")
    data = json.loads(result.stdout)
    assert data["version"] == 2 and data["size"]["parameters"] == 70_000_000_000
    assert data["shortage"] is None and data["largest"] is None
    assert sum(row["fastest"] for row in data["rows"]) == 1
    for row in data["rows"]:
        for tier, need in row["need"].items():
            assert need == sum(item["bytes"] for item in row["items"] if item["tier"] == tier)
        assert row["fits"] == all(row["need"][tier] <= row["have"][tier] for tier in row["need"])
        assert max(row["passes"].values()) <= row["seconds"] <= sum((*row["passes"].values(), *row["update"].values()))


def test_json_says_what_is_missing() -> None:
    data = json.loads(run(f"{LLAMA} --tier device --json").stdout)
    assert data["shortage"]["tier"] == "device"
    assert data["shortage"]["need"] > data["shortage"]["have"]
    assert any(knob["fits"] for knob in data["shortage"]["knobs"])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("line", "least", "most"),
    [
        ("--largest params --machine v100-32gb-dgx2 --dtype float16 --optimizer mixed --stage 0", 1.4e9, 2e9),
        (f"{SMALL} --largest batch", 400, 1600),
        ("--hidden 4096 --largest params --tier host", 70e9, 150e9),
        ("--layers 4 --largest params --tier device", 2e9, 6e9),
    ],
)
def test_largest(line: str, least: float, most: float) -> None:
    data = json.loads(run(f"{line} --json").stdout)
    assert least < data["largest"]["value"] < most
    assert any(row["fits"] for row in data["rows"])


def test_the_largest_comes_first() -> None:
    assert run(f"{SMALL} --tier device --stage 3 --largest batch").stdout.startswith("largest batch: ")


def test_nothing_is_the_largest_when_not_even_one_fits() -> None:
    result = run(f"{LLAMA} --tier device --largest batch --check")
    assert result.exit_code == 1 and result.stdout.startswith("largest batch: 0\n")


def test_a_machine_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_named("gh200").to_json())
    by_file = json.loads(run(f"{SMALL} --machine {path} --json").stdout)
    assert by_file == json.loads(run(f"{SMALL} --machine gh200 --json").stdout)
    smaller = json.loads(run(f"{SMALL} --machine {path} --memory 10GiB --json").stdout)
    assert smaller["rows"][0]["have"]["device"] == int(10 * 2**30 * 0.94)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model.py:make", "there is no file model.py"),
        ("model", "names no model"),
        ("config.json", "cannot read config.json: No such file or directory"),
        ("model.py:make --params 70B", "has its own number of parameters"),
        ("model.py:make --largest params", "has its own number of parameters"),
        ("", "the size of the model is open"),
        ("--params 70X", "is not a count"),
        ("--params 70B --memory 1parsec", "is not a size"),
        ("--params 70B --machine abacus", "no machine 'abacus'"),
        ("--params 70B --dtype int8", "no compute dtype"),
        ("--params 70B --stage 0 --offload parameters", "no row has stage 0 and offload parameters on h100"),
        ("--params 70B --largest params", "solves for --params"),
        ("--layers 2 --hidden 8 --largest params", "solves for --params"),
    ],
)
def test_usage_errors_exit_with_2_and_a_message(line: str, message: str) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert message in result.stderr and not result.stdout


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

class Net(nn.Module):
    def __init__(self, width=4096, layers=96):
        super().__init__()
        self.embed, self.head = nn.Embedding(50000, width), nn.Linear(width, 50000, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        assert self.head.weight.is_meta

def large():
    return Net(), (torch.zeros(1, 8, dtype=torch.int64),)

def empty():
    return nn.GELU()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def test_sizes_are_those_of_a_model_that_is_never_allocated(model: Path) -> None:
    result = run(f"{model}:large --world 64 --json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    parameters = 96 * (12 * 4096**2 + 9 * 4096) + 50000 * 4096
    size = {"parameters": parameters, "layers": 96, "hidden": 4096, "vocab": 50000, "heads": 4}
    assert data["size"] == size and data["model"] == f"{model}:large"
    assert f"{model}:large: 19.5B parameters, 96 layers, hidden 4096, 4 heads, vocabulary 50000" in result.stderr
    printed = run(f"--params {parameters} --layers 96 --hidden 4096 --vocab 50000 --heads 4 --world 64 --json")
    assert json.loads(printed.stdout) == {**data, "model": None}


def test_a_size_that_is_given_replaces_what_was_read(model: Path) -> None:
    size = json.loads(run(f"{model}:large --heads 32 --vocab 128k --json").stdout)["size"]
    assert (size["heads"], size["vocab"], size["layers"]) == (32, 128_000, 96)


def test_a_model_without_parameters_is_refused(model: Path) -> None:
    result = run(f"{model}:empty")
    assert result.exit_code == 2 and "the model has no parameters" in result.stderr


TRACED = """
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(512, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512))
"""


@pytest.fixture
def solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size is solved for once for all runs of a test, which trace one model, and that ask for the same."""
    kept = dict[str, Any]()

    def once(make: Any, *given: Any, **options: Any) -> Any:
        key = repr((given, sorted(options.items())))
        if key not in kept:
            kept[key] = largest_by_stage(make, *given, **options)
        return kept[key]

    monkeypatch.setattr("zerograph.dryrun.largest_fit.largest_by_stage", once)


@pytest.mark.usefixtures("solved_once")
def test_capture_solves_on_the_traced_step_as_well(tmp_path: Path) -> None:
    path = tmp_path / "captured_model.py"
    path.write_text(TRACED)
    line = f"{path}:make --layers 1 --world 4 --seq 64 --memory 64MiB --dtype float32 --largest batch --capture"
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert [row["stage"] for row in data["traced"]] == [1, 2, 3]
    for row in data["traced"]:
        assert row["value"] > 0 and row["need"]["largest"] <= row["have"] < row["need"]["next"]
        assert row["limit"] is None
    shown = run(line).stdout
    assert f"traced step, stage 3, nothing offloaded: largest batch: {data['traced'][2]['value']}; " in shown
    assert ", from sizes alone" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("solved_once")
def test_capture_solves_over_all_tiers_too(tmp_path: Path) -> None:
    path = tmp_path / "captured_model.py"
    path.write_text(TRACED)
    line = f"{path}:make --layers 1 --world 4 --seq 64 --memory 16MiB --dtype float32 --largest batch --capture"
    (stays,) = json.loads(run(f"{line} --stage 3 --json").stdout)["traced"]
    data = json.loads(run(f"{line} --offload gradients --tier host --json").stdout)["traced"]
    assert [row["stage"] for row in data] == [2, 3]
    for row in data:
        assert row["tier"] == "device" and row["need"]["largest"] <= row["have"] < row["need"]["next"]
    assert data[1]["value"] > stays["value"]
    shown = run(f"{line} --offload gradients --tier host").stdout
    assert f"traced step, stage 3, gradients on host: largest batch: {data[1]['value']}; " in shown
    refused = run(f"{line} --offload parameters --stage 2")
    assert refused.exit_code == 2


@pytest.mark.parametrize("line", [f"{LLAMA} --largest batch --capture", "m.py:f --capture", "m.py:f --largest params"])
def test_capture_needs_a_model_and_something_to_solve_for(line: str) -> None:
    result = run(f"{line} --capture" if "--capture" not in line else line)
    assert result.exit_code == 2
    assert "--capture solves for batch or seq on the step of a MODEL" in result.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 100])
def test_every_figure_is_whole_where_a_terminal_is_narrow(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    for name, value in {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("zerograph.cli.estimate.estimate_rows", _estimated)
    main(["estimate", *LLAMA.split(), "--world", "8"], standalone_mode=False)
    assert_whole(terminal.getvalue(), columns)


@pytest.mark.costly
def test_every_figure_is_whole_on_a_narrow_terminal() -> None:
    """In a process on a real one."""
    columns, (master, terminal) = 60, pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    words = [sys.executable, "-m", "zerograph", "estimate", *LLAMA.split(), "--world", "8"]
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(words, stdout=terminal, env=environment) as process:
        os.close(terminal)
        text = b""
        while part := _read(master):
            text += part
    os.close(master)
    assert process.returncode == 0
    assert_whole(text.decode(), columns)


def assert_whole(text: str, columns: int) -> None:
    """No cut figures, no line that a terminal of that width would break."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    plain = run(f"{LLAMA} --world 8").stdout
    figures = re.findall(r"\S+ [KMGT]iB of \S+ [KMGT]iB", " ".join(" ".join(lines).split()))
    assert figures == re.findall(r"\S+ [KMGT]iB of \S+ [KMGT]iB", plain) and len(figures) > 20


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # what Linux says where nobody writes to it any more
        return b""


def test_hosts_of_cpus_are_told() -> None:
    line = "--layers 2 --hidden 256 --vocab 1k --machine cpu --dtype float32 --stage 3 --tier device --world"
    told = "cpu: 2 hosts of 2 ranks, which communicate in two levels"
    assert CliRunner().invoke(main, ["estimate", *line.split(), "4"]).stdout.startswith(told)
    assert "hosts" not in CliRunner().invoke(main, ["estimate", *line.split(), "2"]).stdout
