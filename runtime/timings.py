"""Times of what a recording cannot see by itself: transfers between tiers, and updates of what passes through slots.

They go on in other threads than the program's, in the kernel, and in streams of an accelerator. Whoever waits for one
tells when it began and ended, or events in the stream do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerograph.core.timeline import Stream


@dataclass(eq=False, slots=True)
class TimedUpdate:
    """One update that streams states, while which of a backend's recordings it began (0: before the first one), and
    whether it has ended."""

    recording: int
    ended: bool = False


class Purpose(NamedTuple):
    """What is moved or updated, as :attr:`~zerograph.core.timeline.Span.what` has it, and whose: the name of one
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


class _Marked(NamedTuple):
    """One transfer or update that an accelerator's ``queue`` was told between two events."""

    stream: Stream
    purpose: Purpose
    queue: torch.Stream
    begin: torch.Event
    end: torch.Event

    def timing(self) -> Timing:
        """Its times, once it has ended."""
        # Events know how long they lie apart. One that the host has just waited for ties them to its clock.
        now = _marked(self.queue)
        now.synchronize()
        at = time.time_ns()
        begin, end = (at - round(1e6 * event.elapsed_time(now)) for event in (self.begin, self.end))
        return Timing(self.stream, self.purpose, begin, end)


class Timings:
    """Those of one backend, kept while somebody records."""

    def __init__(self) -> None:
        self._recorded: list[Timing] | None = None
        self._marked: list[_Marked] = []
        self._recording = 0

    def begin(self) -> None:
        """Keep them from here on."""
        self._recorded, self._marked = [], []
        self._recording += 1

    def take(self) -> list[Timing]:
        """Those that were kept, in the order of their beginnings; from now on none are.

        Waits for what an accelerator was told, and raises what that raises.
        """
        recorded, marked = self._recorded or [], self._marked
        self.forget()
        recorded += [each.timing() for each in marked]
        there = (timing._replace(complete=self._has_all_of(timing.purpose.update)) for timing in recorded)
        return sorted(there, key=lambda timing: timing.begin)

    def forget(self) -> None:
        """Keep none any more, nor those that were."""
        self._recorded, self._marked = None, []

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

    def add_told(self, stream: Stream, purpose: Purpose | None, queue: torch.Stream) -> Callable[[], None]:
        """Keep one of all that an accelerator's ``queue`` is told from here until the returned function is called."""
        if self._recorded is None or purpose is None:
            return lambda: None
        marked, begin = self._marked, _marked(queue)
        return lambda: marked.append(_Marked(stream, purpose, queue, begin, _marked(queue)))


def _marked(queue: torch.Stream) -> torch.Event:
    """An event behind what ``queue`` was told, which knows its time."""
    return queue.record_event(torch.Event(queue.device, enable_timing=True))
