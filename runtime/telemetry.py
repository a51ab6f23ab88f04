"""What happened: runs of programs, and how much was whole at a time."""

from __future__ import annotations

from collections import Counter


class Telemetry:
    """Counters of one backend."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.gathers = 0
        self.whole: set[tuple[int, int]] = set()
        self.peak_whole = 0

    def gathering(self, frame: int, bucket: int) -> None:
        """A gather starts: its bucket occupies memory from here on."""
        self.gathers += 1
        self.whole.add((frame, bucket))
        self.peak_whole = max(self.peak_whole, len(self.whole))

    def freed(self, frame: int, bucket: int) -> None:
        """A bucket's full parameters are gone."""
        self.whole.discard((frame, bucket))

    def finished(self, kind: str) -> None:
        """A program of that kind has run."""
        self.runs[kind] += 1
