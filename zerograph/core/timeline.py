"""A step as it will run, or ran: spans on streams and bytes on tiers over time. No torch in here.

A forecast and a measurement share these types, so that one can be laid over the other. Times are seconds from the
start of the step, sizes bytes of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from zerograph.core.machine import LINKS, Tier, Way

Stream = Literal["compute", "gather", "reduce", Way, "cpu_update"]
STREAMS: tuple[Stream, ...] = ("compute", "gather", "reduce", *LINKS.values(), "cpu_update")
COMMUNICATION: tuple[Stream, ...] = ("gather", "reduce")
Operation = Literal["compute", "gather", "free", "reduce", "spill", "fetch", "write", "read", "update"]
NOT_COUNTED = (
    "fragmentation and workspaces of the allocator",
    "Python, launches and synchronization between instructions",
    "buffers of the model, and the batch itself",
)
"""The memory and time that no forecast counts."""


WAIT = "wait"
""":attr:`Span.what` of a measured span in which a stream does nothing: a forward waits for an update before it gathers
what that changes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one stream.

    Attributes:
        task: its index in program order.
        name: what runs, for people: ``"gather layers.3"``.
        module: fully qualified name of the module it belongs to; empty when there is none.
        source: the user's ``file:line`` it comes from; empty when unknown.
        after: earlier tasks that had to end first, besides the previous one on its stream.
        key: what of a plan's programs it runs, by which a run's seconds are found: the digest of a segment, or the
            index of a bucket; empty for the update, and where tasks follow a schedule and no program.
        flops: operations of the matrix products in it.
        operation, phase: what it does, and in which kind of program.
        bucket, tile: that it is about; -1 and 0 where it is about none.
        what: it moves between tiers: "shard", "gradient", "states", "parameters" or "activations"; or :data:`WAIT`.
        label: whose that is, or who is updated: a bucket, a tile of it, a layer or an activation.
        token_tiles: into how many tiles of tokens the plan divides work where it computes: of a program it is one of
            them, of a schedule it stands for all.
    """

    task: int
    name: str
    stream: Stream
    start: float
    end: float
    module: str = ""
    source: str = ""
    after: tuple[int, ...] = ()
    key: str = ""
    flops: int = 0
    operation: Operation = "compute"
    phase: str = ""
    bucket: int = -1
    tile: int = 0
    what: str = ""
    label: str = ""
    token_tiles: int = 1


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes a tier holds, and the task during which it does so first."""

    bytes: int
    task: int
    name: str
    module: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step.

    Attributes:
        spans: in program order.
        memory: per tier, the bytes it holds from each moment on, ascending in time.
        peaks: per tier that holds anything.
        critical_path: tasks, in time order, whose delay would delay the step.
        not_counted: what the numbers leave out, for people.
    """

    spans: tuple[Span, ...]
    memory: Mapping[Tier, tuple[tuple[float, int], ...]]
    peaks: Mapping[Tier, Peak]
    critical_path: tuple[int, ...] = ()
    not_counted: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self) -> dict[Stream, float]:
        """Seconds per stream in which it works."""
        total: dict[Stream, float] = {}
        for span in self.at_work():
            total[span.stream] = total.get(span.stream, 0.0) + span.end - span.start
        return total

    @property
    def exposed_communication(self) -> float:
        """Seconds in which collectives run and nothing computes."""
        # Copies and updates count as work: while they run, the step does not wait for the network alone.
        working = union((s.start, s.end) for s in self.at_work() if s.stream not in COMMUNICATION)
        talking = union((s.start, s.end) for s in self.at_work() if s.stream in COMMUNICATION)
        return sum(end - start for start, end in talking) - _overlap(talking, working)

    def computing(self, peak: Peak) -> Span | Peak:
        """The task that computes when another one reaches ``peak``; ``peak`` itself where none does."""
        if peak.task < 0:
            return peak
        time = self.spans[peak.task].start
        return next((s for s in self.spans if s.stream == "compute" and s.start <= time < s.end), peak)

    def at_work(self) -> Iterator[Span]:
        """The spans in which a stream does something."""
        return (span for span in self.spans if span.what != WAIT)


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals that cover the same time, disjoint and ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _overlap(a: list[Interval], b: list[Interval]) -> float:
    """Common length of two ascending lists of disjoint intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
