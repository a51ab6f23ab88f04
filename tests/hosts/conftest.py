"""Hosts for these tests: network namespaces, which `benchmarks/namespaces.py` makes. It takes root and `iproute2`."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Three of them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    with importlib.import_module("namespaces").Hosts(3, "1gbit") as made:
        yield made
        for host in made:  # what a failed test has left there
            left = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
            for pid in map(int, left.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def disks(hosts: list[Any], tmp_path: Path) -> Iterator[Path]:
    """A folder that all hosts share, with the disk of each, in memory, under the host's name."""
    mounted = list[Path]()
    try:
        for host in hosts:
            disk = tmp_path / host.name
            disk.mkdir()
            made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", host.name, disk], check=False)
            if made.returncode:
                pytest.skip("this machine allows no mounts")
            mounted.append(disk)
        yield tmp_path
    finally:
        for disk in mounted:
            subprocess.run(["umount", "--lazy", disk], check=False)
