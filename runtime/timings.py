"""Times of what a recording cannot see by itself: transfers to and from NVMe, and updates of what passes through slots.

They go on in other threads than the program's, and in the kernel. Whoever waits for one tells when it began and ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerograph.core.timeline import Stream


@dataclass(eq=False, slots=True)
class TimedUpdate:
    """One update that streams states, while which of a backend's recordings it began (0: before the first one), and
    whether it has ended."""

    recording: int
    ended: bool = False


class Purpose(NamedTuple):
    """What is moved or updated, as :attr:`~zerograph.core.instructions.Move.what` has it, and whose: the name of one
    parameter of the bucket, or of what activations belong to; of states the ``update`` that they move for."""

    what: str
    whose: str
    update: TimedUpdate | None = None


class Timing(NamedTuple):
    """One transfer or update on a stream, in nanoseconds since 1970.

    Attributes:
        complete: whether the recording has all of what it belongs to: an update may have begun before, or end behind
            it.
    """

    stream: Stream
    purpose: Purpose
    begin: int
    end: int
    complete: bool = True


class Timings:
    """Those of one backend, kept while somebody records."""

    def __init__(self) -> None:
        self._recorded: list[Timing] | None = None
        self._recording = 0

    def begin(self) -> None:
        """Keep them from here on."""
        self._recorded = []
        self._recording += 1

    def take(self) -> list[Timing]:
        """Those that were kept, in the order of their beginnings; from now on none are."""
        recorded, self._recorded = self._recorded, None
        there = (timing._replace(complete=self._has_all_of(timing.purpose.update)) for timing in recorded or ())
        return sorted(there, key=lambda timing: timing.begin)

    def _has_all_of(self, update: TimedUpdate | None) -> bool:
        return update is None or (update.ended and update.recording == self._recording)

    def update(self) -> TimedUpdate:
        """An update that begins."""
        return TimedUpdate(self._recording if self._recorded is not None else 0)

    def add(self, stream: Stream, purpose: Purpose | None, begin: int, end: int) -> None:
        """Keep one, of any thread; what has no ``purpose`` is no part of a step."""
        recorded = self._recorded
        if recorded is not None and purpose is not None and end:
            recorded.append(Timing(stream, purpose, begin, end))
