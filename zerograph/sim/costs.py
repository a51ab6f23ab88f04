"""What one instruction costs: its seconds on a stream, and the memory that it takes and gives."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from zerograph.core.files.runfile import Measured
from zerograph.core.instructions import (
    BeginUpdate,
    Collective,
    Compute,
    Computing,
    Free,
    Gather,
    Instruction,
    OffDevice,
    Timed,
    View,
    Wait,
    WaitFetch,
    WaitGather,
)
from zerograph.core.machine import Tier
from zerograph.core.program import Program
from zerograph.core.timeline import Stream
from zerograph.sim.rates import Rates

TierBytes = tuple[tuple[Tier, int], ...]
"""Bytes per tier."""


def on(tier: Tier, size: int) -> TierBytes:
    """``size`` bytes on ``tier``."""
    return ((tier, size),) if size else ()


# Numbers and not classes: `walk` is where a search spends its time, on the same instructions over and over.
COMPUTE, GATHER, REDUCE, MOVE, WAIT, FREE, VIEW, MARK, ARRIVE = range(9)


class Apart(NamedTuple):
    """A collective between CPU hosts, whose seconds on its stream are those of a network."""

    cores: float  # seconds that what computes spends on it besides
    travels: bool  # whether it occupies the network at all


class Fact(NamedTuple):
    """The facts about an instruction that :func:`~zerograph.sim.simulate.walk` needs.

    ``takes`` and ``gives`` hold where every register it names has memory of its own.
    """

    instruction: Instruction
    role: int
    stream: Stream
    seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    takes: TierBytes
    gives: TierBytes
    part: tuple[int, int]  # of a gather, its wait and a free: bucket and tile
    slot: int | None
    resident: bool
    ends: bool
    replaced: int  # bytes of what dies in it that are free from its start
    apart: Apart | None


class Costs:
    """The costs of instructions in seconds and memory; those that were met before are known."""

    def __init__(self, rates: Rates, measured: Measured | None = None) -> None:
        self.rates, self.measured = rates, measured
        self.overlaps, self.network = rates.overlaps, rates.network
        self.uses_buffers_again = rates.uses_buffers_again
        self.known: dict[int, Fact] = {}  # by identity; the fact keeps its instruction alive

    def learn(self, instruction: Instruction, program: Program) -> Fact:
        """All about ``instruction``, from now on known."""
        contents, reads, writes = program.contents, instruction.reads, instruction.writes
        takes: dict[Tier, int] = defaultdict(int)
        gives: dict[Tier, int] = defaultdict(int)
        for register in writes if contents else ():
            # What an instruction writes over, it takes no memory for.
            if register not in reads:
                takes[contents[register].tier] += contents[register].bytes
        for register in instruction.dead if contents else ():
            gives[contents[register].tier] += contents[register].bytes
        role, seconds, key, replaced = FREE, 0.0, (-1, 0), 0
        if isinstance(instruction, Compute):
            extra = program.segments[instruction.segment].memory.extra()
            takes["device"] += max(0, extra)
            gives["device"] += extra
            replaced = max(0, -extra)
        if isinstance(instruction, Computing):
            role = COMPUTE
        elif isinstance(instruction, View):
            role = VIEW
        elif isinstance(instruction, BeginUpdate):
            role = MARK
        elif isinstance(instruction, Collective):
            role = GATHER if isinstance(instruction, Gather) else REDUCE
        elif isinstance(instruction, OffDevice):
            role = MOVE
        elif isinstance(instruction, Wait):
            role = ARRIVE if isinstance(instruction, WaitFetch) and instruction.by_gather else WAIT
        apart = None
        if isinstance(instruction, Timed):
            known = self.measured.of(instruction, program.segments) if self.measured is not None else None
            seconds = self.rates.seconds(instruction, program.segments) if known is None else known
            # A run has the seconds in which a collective, or the wait for it, kept compute from running.
            if self.network and known is None and isinstance(instruction, Collective):
                cores = self.rates.cores(instruction)
                apart = Apart(cores, travels=seconds > cores)
                if role == GATHER:
                    # It ends in each host, where a reduction begins: what waits for it does that.
                    seconds -= cores
        if isinstance(instruction, WaitGather):
            takes["device"] += instruction.kept
        elif isinstance(instruction, Gather):
            gives["device"] += instruction.ended
        if isinstance(instruction, (Gather, WaitGather, Free)):
            key = (instruction.bucket, instruction.tile)
        place = instruction.slot if isinstance(instruction, OffDevice) else None
        fact = Fact(
            instruction, role, instruction.stream or "compute", seconds, reads, writes,
            tuple(item for item in takes.items() if item[1]), tuple(item for item in gives.items() if item[1]),
            key, place, isinstance(instruction, Free) and instruction.resident,
            isinstance(instruction, Free) and instruction.ends, replaced, apart,
        )  # fmt: skip
        self.known[id(instruction)] = fact
        return fact
