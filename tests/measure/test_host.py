"""The memory that processes here may use, and what others take of the machine while it is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerograph.measure import host
from zerograph.measure.host import Others, host_memory


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, unlimited, missing = tmp_path / "memory.max", tmp_path / "unlimited", tmp_path / "missing"
    unlimited.write_text("max\n")
    monkeypatch.setattr(host, "_LIMITS", (unlimited, missing))
    assert host_memory() > 2**20
    limit.write_text(f"{2**20}\n")
    monkeypatch.setattr(host, "_LIMITS", (unlimited, limit, missing))
    assert host_memory() == 2**20


def test_a_process_that_is_not_ours_is_seen_and_a_child_that_ended_is_ours() -> None:
    others = Others()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.5)
        running = others.share()
        busy.kill()
    assert running > 0.5 / (os.cpu_count() or 1)
    assert others.share() < running


def test_ranks_beside_this_one_are_ours() -> None:
    others = Others()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.5)
        assert others.share(beside=1.0) < others.share()
        assert others.share(beside=1e9) == 0
        busy.kill()
