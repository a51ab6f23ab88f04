"""`zerograph bench` with small sizes on this machine, and what it refuses.

Tests ``measure/rank.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from click.testing import CliRunner

from zerograph import measure
from zerograph.cli import main
from zerograph.cli.bench import rows
from zerograph.core.machine import PRESETS, Link, Machine
from zerograph.measure.job import RankReport
from zerograph.sim.rates import Rates


def bench(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerograph", "bench", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environment}
    )


def test_this_machine_is_measured_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    run = bench("--quick", "--json", "-o", str(file), "--path", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stdout == file.read_text()
    machine = Machine.from_json(run.stdout)
    assert Machine.from_json(machine.to_json()) == machine
    assert list(tmp_path.iterdir()) == [file]
    printed = [line for line in run.stderr.splitlines() if line == "measuring matrix products in bfloat16 ..."]
    assert len(printed) == 3, "every rate is measured in three rounds"
    assert_plausible(machine)


def assert_plausible(machine: Machine) -> None:
    assert set(machine.matmul) == set(machine.attention) == {"float32", "bfloat16", "float16"}
    for rate in (*machine.matmul.values(), *machine.attention.values()):
        assert 1e7 < rate < 1e16
    links = (machine.h2d, machine.d2h, machine.intra, machine.inter, machine.update)
    for link in (*links, machine.nvme_read, machine.nvme_write):
        assert 1e6 < link.rate < 1e13 and 0 <= link.latency < 0.1
    assert 1e8 < machine.device_bandwidth < 1e13 and 1e8 < machine.cpu_optimizer < 1e13
    assert 1e-8 < machine.launch < 1e-3
    assert machine.device_memory * machine.ranks_per_node <= machine.host_memory or machine.device == "cuda"


@pytest.mark.slow
def test_one_rank_has_no_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is this process: one of its own would import torch first."""
    from zerograph.measure.rank import work

    monkeypatch.setattr(measure, "run_ranks", lambda job, tell: [work(job, 0, str(tmp_path / "store"), tell)])
    threads = torch.get_num_threads()
    try:
        machine = measure.measure(tmp_path, 1, measure.QUICK)
    finally:
        torch.set_num_threads(threads)
    assert machine is not None and machine.ranks_per_node == 1 and "so is intra" in machine.notes


@pytest.mark.slow
def test_ranks_that_torchrun_has_started_measure_together(tmp_path: Path) -> None:
    file, torchrun = tmp_path / "machine.json", [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "zerograph", "bench", "--quick", "--json", "-o", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == file.read_text(), "the first rank writes, and no other"
    machine = Machine.from_json(run.stdout)
    assert machine.ranks_per_node == 2 and "2 ranks; " in machine.notes and "inter is a guess" in machine.notes
    assert run.stderr.count("measuring all-gathers ...") == 3
    assert_plausible(machine)


def test_ranks_of_a_launcher_are_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["bench", "--world", "2"])
    assert result.exit_code == 2 and result.stdout == ""
    assert "error: 2 ranks were asked for, and torchrun has started 4\n\nhint: leave --world out" in result.stderr


@pytest.mark.parametrize(("device", "each"), [("cpu", 2), ("cpu", 1), ("cuda", 2)])
def test_the_link_between_hosts_is_what_gathers_show(device: str, each: int) -> None:
    """Times that a forecast by a link would have give that link back."""
    like = PRESETS["cpu"] if device == "cpu" else PRESETS["a100-80gb"]
    link = Link(1e9, 1e-4)
    known = replace(like, ranks_per_node=each, inter=link, inter_step=0.0, intra_step=0.0)
    sizes = [2**20, 2**22, 2**24]
    between = tuple((size, ((Rates(known, 4, "float32").collective(size),) * 2,)) for size in sizes)
    reports = [cast(RankReport, SimpleNamespace(between=between, two_levels=known.hosts(4) > 1))] * 4
    found = measure._inter(reports, each, known.intra)
    assert found is not None
    assert found.rate == pytest.approx(link.rate, rel=1e-6) and found.latency == pytest.approx(link.latency, rel=1e-3)


def test_a_rank_that_fails_is_one_error(tmp_path: Path) -> None:
    run = bench("--quick", "--path", str(tmp_path), ZEROGRAPH_TRANSPORT="pigeon", ZEROGRAPH_DEBUG="0")
    assert run.returncode == 2 and run.stdout == ""
    assert "error: ZEROGRAPH_TRANSPORT='pigeon' names no transport\n\nhint: " in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["none/machine.json", "."])
def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path, output: str) -> None:
    result = CliRunner().invoke(main, ["bench", "-o", str(tmp_path / output)])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: cannot write ") and "hint: -o FILE" in result.stderr
    assert "measuring" not in result.stderr


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "--path", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    result = CliRunner().invoke(main, ["bench", "--path", "/proc"])
    assert result.exit_code == 2
    assert "error: cannot measure the disk of /proc: " in result.stderr and "hint: --path DIR" in result.stderr


def test_every_preset_can_be_shown() -> None:
    for machine in PRESETS.values():
        shown = {str(name[0]): str(value) for name, value in rows(machine)}
        assert shown["machine"] == machine.name
        assert shown["collectives"].endswith(" us") and " GB/s, " in shown["collectives"]


def test_units() -> None:
    cpu = {str(name[0]): str(value) for name, value in rows(PRESETS["cpu"])}
    assert cpu["matrix products, float32"] == "90 GFLOP/s per rank"
    assert cpu["disk read"] == "2 GB/s, 100 us"
    assert PRESETS["cpu"].nvme_read == Link(2e9, 1e-4)
