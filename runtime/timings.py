"""Times of what a recording cannot see by itself: transfers to and from NVMe, and updates of what passes through slots.

They go on in other threads than the program's, and in the kernel. Whoever waits for one tells when it began and ended.
"""

from __future__ import annotations

from typing import NamedTuple

from zerograph.core.timeline import Stream


class Purpose(NamedTuple):
    """What is moved or updated, as :attr:`~zerograph.core.instructions.Move.what` has it, and whose: the name of one
    parameter of the bucket, or of what activations belong to."""

    what: str
    whose: str


class Timing(NamedTuple):
    """One transfer or update on a stream, in nanoseconds since 1970."""

    stream: Stream
    purpose: Purpose
    begin: int
    end: int


class Timings:
    """Those of one backend, kept while somebody records."""

    def __init__(self) -> None:
        self._kept: list[Timing] | None = None

    def begin(self) -> None:
        """Keep them from here on."""
        self._kept = []

    def take(self) -> list[Timing]:
        """Those that were kept, in the order of their beginnings; from now on none are."""
        kept, self._kept = self._kept, None
        return sorted(kept or (), key=lambda timing: timing.begin)

    def add(self, stream: Stream, purpose: Purpose | None, begin: int, end: int) -> None:
        """Keep one, of any thread; what has no ``purpose`` is no part of a step."""
        kept = self._kept
        if kept is not None and purpose is not None and end:
            kept.append(Timing(stream, purpose, begin, end))
