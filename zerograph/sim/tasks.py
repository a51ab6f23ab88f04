"""The tasks of a step: when each starts and ends on its stream, and what it takes and gives back then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from zerograph.core.files.planfile import Holding
from zerograph.core.instructions import Accumulate, Compute, Computing, OffDevice, Place, Timed
from zerograph.core.machine import TIERS, Tier
from zerograph.core.program import Program
from zerograph.core.timeline import Span, Stream
from zerograph.sim.costs import Fact

LATE = 1 << 62
"""The order of what is taken at a moment, behind all that is given back then."""
Event = tuple[float, int, int, int]
"""A moment, the order of what happens then, the task, and the bytes it takes (or gives, below zero).

A task that ends at a moment gives back before one that starts then takes; only a task without length takes first.
"""


@dataclass(slots=True)
class Tasks:
    """The tasks: instructions that occupied a stream, in program order.

    Attributes:
        instructions, after: with their programs, and the tasks that each waited for besides the one before it on its
            stream; empty unless asked for.
        free: by stream, when its last task ends.
        streams, facts: of each task; facts only of those that were simulated.
        programs: the first task of each program.
        events: by tier, what is taken and given back when.
    """

    instructions: list[tuple[Timed, Program]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    free: dict[Stream, float] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    events: dict[Tier, list[Event]] = field(default_factory=lambda: {tier: [] for tier in TIERS})

    def last_of(self, after: Sequence[int], computed: int) -> int:
        """The task that ends last of those in ``after``, which something waits for, and the one that computed before
        it; -1 where there are none."""
        waited = [*after, computed] if computed >= 0 else after
        return max(waited, key=self.ends.__getitem__, default=-1)

    def take(self, tier: Tier, size: int, task: int) -> None:
        """``task`` takes memory at its start."""
        start = self.starts[task]
        self.events[tier].append((start, 2 * task if self.ends[task] == start else LATE, task, size))

    def give(self, tier: Tier, size: int, task: int) -> None:
        """Memory is free at the end of ``task``."""
        self.events[tier].append((self.ends[task], 2 * task + 1, task, -size))

    def hold(self, size: int, gather: int, first: int, last: int, free: bool) -> None:
        """The buffer of ``gather`` holds memory of the device from ``first`` to the end of ``last``, or of all (-1)."""
        self.take("device", size, first)
        if last >= 0:
            self.give("device", size, last)

    def hold_all(self, holdings: Iterable[Holding]) -> dict[Tier, int]:
        """Take and give back ``holdings``; returns the bytes of each tier that are there before the first task."""
        levels: dict[Tier, int] = defaultdict(int)
        for holding in holdings:
            if holding.first == -1:
                levels[holding.tier] += holding.bytes
            else:
                self.take(holding.tier, holding.bytes, holding.first)
            if holding.last != -1:
                self.give(holding.tier, holding.bytes, holding.last)
        return levels

    def described(self) -> Iterator[Span]:
        """Each of them, for people."""
        for index, (instruction, program) in enumerate(self.instructions):
            segment = program.segments[instruction.segment] if isinstance(instruction, Compute) else None
            product = instruction.flops if isinstance(instruction, (Accumulate, Place)) else 0
            yield Span(
                task=index,
                name=program.name(instruction),
                stream=instruction.stream or "compute",
                start=self.starts[index],
                end=self.ends[index],
                module=program.module(instruction),
                source=instruction.source if isinstance(instruction, Compute) else "",
                after=self.after[index],
                key=segment.digest if segment is not None else "",
                flops=segment.flops // segment.slices if segment is not None else product,
                operation=instruction.operation,
                phase=program.kind,
                bucket=-1 if isinstance(instruction, Computing) else instruction.bucket,
                tile=0 if isinstance(instruction, Computing) else instruction.tile,
                what=instruction.what if isinstance(instruction, OffDevice) else "",
                label="" if segment is not None else program.label(instruction),
                token_tiles=instruction.token_tiles if isinstance(instruction, Compute) else 1,
            )
