"""Counters of what happened: runs of programs, and how much was whole at a time."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch.profiler import record_function


class Telemetry:
    """Counters of one backend.

    ``recording``: executors mark every instruction for torch's profiler, see :func:`label`.
    """

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.gathers = 0
        self.unsharded: set[tuple[int, int, int]] = set()
        self.peak_unsharded = 0
        self.recording = False
        self._update: record_function | None = None

    def gathering(self, frame: int, bucket: int, tile: int = 0) -> None:
        """A gather starts: its bucket, or the tile of it, occupies memory from here on."""
        self.gathers += 1
        self.unsharded.add((frame, bucket, tile))
        self.peak_unsharded = max(self.peak_unsharded, len(self.unsharded))

    def freed(self, frame: int, bucket: int, tile: int = 0) -> None:
        """A bucket's full parameters are gone."""
        self.unsharded.discard((frame, bucket, tile))

    def failed(self) -> None:
        """A program ended by an error: no bucket stays unsharded."""
        self.unsharded.clear()

    def updating(self) -> None:
        """An optimizer begins its update."""
        if self.recording:
            # One that raised is still open: torch calls no hook after a step that failed.
            self.updated()
            self._update = record_function(label(0, "update", 0))
            self._update.__enter__()

    def updated(self) -> None:
        """An update ends."""
        if self._update is not None:
            if torch.accelerator.is_available():  # like each instruction, it lasts until the device has made it
                torch.accelerator.synchronize()
            self._update.__exit__(None, None, None)
            self._update = None

    def finished(self, kind: str) -> None:
        """A program of that kind has run."""
        self.runs[kind] += 1


def label(frame: int, kind: str, index: int) -> str:
    """The name under which the profiler sees instruction ``index`` of a frame's program."""
    return f"zg {frame} {kind} {index}"


LABEL = re.compile(r"zg (\d+) (\w+) (\d+)")
"""Reads what :func:`label` writes."""
