"""What a result must say about where it was measured, and how much else ran there meanwhile."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from zerograph.measure.host import busy_seconds

PACKAGES = ("torch", "zerograph", "deepspeed", "triton")


def machine_facts(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "memory": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES if version(name)},
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def processes(parser: argparse.ArgumentParser, asked: int | None, device: str) -> int:
    """How many ranks to start: as many as were asked for, else one for each GPU, or two on a CPU. It ends the program
    where there are fewer GPUs: NCCL wants one for each rank."""
    if device != "cuda":
        return asked or 2
    found = torch.cuda.device_count()
    if not found or (asked or 0) > found:
        parser.error(f"{asked or 'one or more'} rank(s) on CUDA need as many GPUs, and this machine has {found}")
    return asked or found


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    where = f"{facts['cpu']}, {facts['cores']} cores, {facts['isa']}, {facts['memory'] / 2**30:.0f} GiB"
    return f"{facts.get('gpu', where)}; Python {facts['python']}, {versions}"


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Adds one line to a JSON Lines file."""
    with path.open("a") as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record}) + "\n")


@dataclass(slots=True)
class Load:
    """How much of the machine other processes took during the measured bursts, steal included."""

    others: float = 0.0
    capacity: float = 0.0
    before: tuple[float, float] = field(default=(0.0, 0.0))

    def start(self) -> None:
        self.before = busy_seconds(), time.monotonic()

    def stop(self, ours: float) -> None:
        """`ours`: CPU seconds of the measured processes since `start`."""
        busy, now = busy_seconds(), time.monotonic()
        self.others += max(0.0, busy - self.before[0] - ours)
        self.capacity += (now - self.before[1]) * (psutil.cpu_count() or 1)

    def add(self, other: Load) -> None:
        self.others += other.others
        self.capacity += other.capacity

    @property
    def share(self) -> float:
        return self.others / self.capacity if self.capacity else 0.0
