"""What one instruction costs: its seconds on a stream, and the memory that it takes and gives."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, get_args

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
    Reduce,
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
    replaced: int  # bytes of what dies in it that are free from its start
    part: tuple[int, int]  # of a gather, its wait and a free: bucket and tile
    slot: int | None
    resident: bool
    ends: bool
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
        seconds, apart = self._seconds(instruction, program) if isinstance(instruction, Timed) else (0.0, None)
        takes, gives, replaced = _memory_of(instruction, program)
        fact = Fact(
            instruction=instruction,
            role=_role_of(instruction),
            stream=instruction.stream or "compute",
            seconds=seconds,
            reads=instruction.reads,
            writes=instruction.writes,
            takes=takes,
            gives=gives,
            replaced=replaced,
            part=_part_of(instruction),
            slot=instruction.slot if isinstance(instruction, OffDevice) else None,
            resident=isinstance(instruction, Free) and instruction.resident,
            ends=isinstance(instruction, Free) and instruction.ends,
            apart=apart,
        )
        self.known[id(instruction)] = fact
        return fact

    def _seconds(self, instruction: Timed, program: Program) -> tuple[float, Apart | None]:
        """The seconds on its stream, and of a collective between CPU hosts what it takes besides."""
        if self.measured is not None and (known := self.measured.of(instruction, program.segments)) is not None:
            # A run has the seconds in which a collective, or the wait for it, kept compute from running.
            return known, None
        seconds = self.rates.seconds(instruction, program.segments)
        if not (self.network and isinstance(instruction, Collective)):
            return seconds, None
        cores = self.rates.cores(instruction)
        apart = Apart(cores, travels=seconds > cores)
        # A gather ends in each host, where a reduction begins: what waits for it does that.
        return seconds - cores if isinstance(instruction, Gather) else seconds, apart


_ROLES: dict[type[Instruction], int] = {
    **dict.fromkeys(get_args(Computing), COMPUTE), **dict.fromkeys(get_args(OffDevice), MOVE),
    **dict.fromkeys(get_args(Wait), WAIT), Gather: GATHER, Reduce: REDUCE, Free: FREE, View: VIEW, BeginUpdate: MARK,
}  # fmt: skip


def _role_of(instruction: Instruction) -> int:
    arrives = isinstance(instruction, WaitFetch) and instruction.by_gather
    return ARRIVE if arrives else _ROLES[type(instruction)]


def _part_of(instruction: Instruction) -> tuple[int, int]:
    if isinstance(instruction, (Gather, WaitGather, Free)):
        return instruction.bucket, instruction.tile
    return -1, 0


def _memory_of(instruction: Instruction, program: Program) -> tuple[TierBytes, TierBytes, int]:
    """The bytes that it takes and gives, and of what dies in it those that are free from its start."""
    takes: dict[Tier, int] = defaultdict(int)
    gives: dict[Tier, int] = defaultdict(int)
    replaced, contents = 0, program.contents
    if contents:
        for register in instruction.writes:
            # What an instruction writes over, it takes no memory for.
            if register not in instruction.reads:
                takes[contents[register].tier] += contents[register].bytes
        for register in instruction.dead:
            gives[contents[register].tier] += contents[register].bytes
    if isinstance(instruction, Compute):
        extra = program.segments[instruction.segment].memory.extra()
        takes["device"] += max(0, extra)
        gives["device"] += extra
        replaced = max(0, -extra)
    elif isinstance(instruction, WaitGather):
        takes["device"] += instruction.kept
    elif isinstance(instruction, Gather):
        gives["device"] += instruction.ended
    return tuple(item for item in takes.items() if item[1]), tuple(item for item in gives.items() if item[1]), replaced
