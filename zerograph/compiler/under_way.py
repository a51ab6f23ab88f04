"""What a recorded step moved between tiers and updated through slots, and when, instruction by instruction.

Programs begin transfers and others wait for them, so that the spans of their instructions say little. The runtime's
timings (:mod:`zerograph.runtime.timings`) say when bytes moved, wherever that was begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerograph.core.files.runfile import move_key
from zerograph.core.instructions import Move
from zerograph.core.machine import LINKS
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.timeline import WAIT, Interval, Operation, Span, Stream, union
from zerograph.runtime.timings import Timing

_OPERATIONS: Mapping[str, Operation] = {
    way: Move(source, target, "", "", "", 0, (), ()).operation for (source, target), way in LINKS.items()
}
"""By the stream of transfers, the operation that instructions call them."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Transfers or updates of one kind, of one bucket or some activations, in one program.

    Attributes:
        phase: kind of the program, "update" for all that moves for one.
        bucket: -1 of activations.
        complete: whether the recording has all of what they belong to, and not a part of an update.
        times: in which some were under way, in nanoseconds since 1970; disjoint and ascending.
    """

    stream: Stream
    what: str
    label: str
    phase: str
    bucket: int
    complete: bool
    times: tuple[Interval, ...]

    @property
    def operation(self) -> Operation:
        """What they do."""
        return _OPERATIONS.get(self.stream, "update")

    @property
    def key(self) -> str:
        """Under which a run keeps the seconds of each."""
        return move_key(self.operation, self.what, self.bucket, self.label)

    @property
    def seconds(self) -> float:
        """In which some were under way."""
        return length(self.times)

    def spans(self) -> Iterator[tuple[Interval, Span]]:
        """One for each of the ``times``, without task, start and end."""
        what = "" if self.operation == "update" else f" {self.what} of"
        name = f"wait for the update of {self.label}" if self.what == WAIT else f"{self.operation}{what} {self.label}"
        for times in self.times:
            yield (
                times,
                Span(
                    0, name, self.stream, 0.0, 0.0, self.label,
                    operation=self.operation, phase=self.phase, bucket=self.bucket, what=self.what, label=self.label,
                ),
            )  # fmt: skip


def under_way(timings: Iterable[Timing], plan: Plan, backward: int) -> list[UnderWay]:
    """What ``timings`` tell of a step under ``plan`` whose ``backward`` began then."""
    bucket_of = {param.name: bucket for bucket in plan.buckets for param in bucket.params}
    found: dict[tuple[Stream, str, str, str, int, bool], list[Interval]] = {}
    for timing in timings:
        what, whose, update = timing.purpose
        bucket = bucket_of.get(whose)
        updates = update is not None or what in ("states", "parameters")
        phase = "update" if updates else "forward" if timing.begin < backward else "backward"
        label, index = (bucket.name, bucket.index) if bucket is not None else (whose, -1)
        key = (timing.stream, what, label, phase, index, timing.complete)
        found.setdefault(key, []).append((timing.begin, timing.end))
    return [UnderWay(*key, tuple(union(times))) for key, times in found.items()]


def seconds_of(moves: Iterable[UnderWay], programs: Sequence[Program]) -> dict[str, float]:
    """By :attr:`UnderWay.key`, the mean seconds of an instruction in ``programs``, or of an update, which has one for
    each bucket."""
    counts: dict[tuple[str, str], int] = {}
    for program in programs:
        for each in program.instructions:
            if isinstance(each, Move):
                key = (move_key(each.operation, each.what, each.bucket, each.label), program.kind)
                counts[key] = counts.get(key, 0) + 1
    found: dict[str, list[UnderWay]] = {}
    for move in moves:
        if move.complete and move.what != WAIT:
            found.setdefault(move.key, []).append(move)
    return {
        key: sum(move.seconds for move in same) / sum(counts.get((key, move.phase), 1) for move in same)
        for key, same in found.items()
    }


def length(times: Iterable[Interval]) -> float:
    """Seconds of disjoint intervals."""
    return sum(end - begin for begin, end in times) / 1e9
