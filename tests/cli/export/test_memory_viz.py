"""The snapshot: PyTorch's own tools read it, and replaying it gives what the plan holds."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plans import plan_file

from zerograph.cli.export import memory_viz
from zerograph.core.files.planfile import Holding

READABLE = {
    *("PROTO", "FRAME", "STOP", "MEMOIZE", "MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "EMPTY_DICT"),
    *("EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINGET", "LONG_BINGET", "BININT", "BININT1"),
    *("BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "NEWFALSE", "NEWTRUE", "NONE", "BINFLOAT"),
}
"""Opcodes that the reader in the visualizer's MemoryViz.js knows."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    memory_viz.write(plan_file(4, offload=True), tmp_path / "snapshot.pickle")
    return tmp_path / "snapshot.pickle"


def test_pytorch_reads_it(path: Path) -> None:
    from torch.cuda import _memory_viz

    data = pickle.loads(path.read_bytes())
    assert "blocks.3.weight" not in _memory_viz.segsum(data), "it counts segments, and every byte is accounted for"
    assert "192.0MiB" in _memory_viz.segsum(data)
    listing = _memory_viz.trace(data)
    assert "Device 0" in listing and "# free completed for" in listing
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(data)
    assert "snapshot.pickle" in _memory_viz.trace_plot(data, filter_freed=True)
    stacks: list[str] = []
    _memory_viz.memory(data, format_flamegraph=lambda lines: stacks.append(lines) or "")
    assert "optimizer states (state)" in stacks[0]


def test_its_command_line_reads_it(path: Path) -> None:
    out = path.with_suffix(".html")
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert "Active Memory Timeline" in out.read_text()


def test_the_page_of_the_visualizer_can_read_the_pickle(path: Path) -> None:
    assert {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())} <= READABLE


def test_nothing_overlaps_and_everything_held_is_there(path: Path) -> None:
    file = plan_file(4, offload=True)
    data = pickle.loads(path.read_bytes())
    for device, tier in enumerate(("device", "host", "nvme")):
        most = replay(data, device)
        spans = file.forecast.spans
        mine = [h for h in file.holdings if h.tier == tier]
        assert most == max(held_at(mine, spans, s.start) for s in spans)


def held_at(holdings: list[Holding], spans: Any, time: float) -> int:
    begun = [h for h in holdings if h.first == -1 or spans[h.first].start <= time]
    return sum(h.bytes for h in begun if h.last == -1 or spans[h.last].end > time)


def replay(data: dict[str, Any], device: int) -> int:
    """Run a device's trace backwards from the blocks at the end, as the visualizer does; the most bytes there were."""
    live = {
        block["address"]: block["size"]
        for segment in data["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    most = sum(live.values())
    for event in reversed(data["device_traces"][device]):
        if event["action"] == "alloc":
            assert live.pop(event["addr"]) == event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
            placed = sorted(live.items())
            assert all(a + size <= b for (a, size), (b, _) in pairwise(placed))
        most = max(most, sum(live.values()))
    return most


def test_sources_are_frames(path: Path) -> None:
    trace = pickle.loads(path.read_bytes())["device_traces"][0]
    assert trace[0]["frames"][0] == {"filename": "model.py", "line": 40, "name": "blocks.0.weight (gathered)"}
    assert trace[0]["frames"][1]["name"] == "blocks.0"


def test_what_is_held_for_a_moment_only() -> None:
    file = plan_file(1)
    spans = tuple(replace(span, end=span.start) for span in file.forecast.spans)
    held = tuple(Holding(str(i), "temporary", "device", 8, 1, 1) for i in range(3))
    data = memory_viz.snapshot(replace(file, forecast=replace(file.forecast, spans=spans), holdings=held))
    assert replay(data, 0) == 24


def test_a_plan_that_holds_nothing() -> None:
    data = memory_viz.snapshot(replace(plan_file(1), holdings=()))
    assert data["segments"] == [] and data["device_traces"] == [[], [], []]
