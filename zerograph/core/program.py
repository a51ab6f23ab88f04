"""A program: the instructions of one forward, backward or update (:mod:`zerograph.core.instructions`), as plain data.

Three builders emit them: the planner coarse programs of a step (:mod:`zerograph.planner.programs.coarse`), lowering
what will run (``compiler/lowering/lower.py``), the optimizer its update. Four read them: :mod:`zerograph.sim.simulate`,
:mod:`zerograph.sim.check`, the executor, and the viewers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerograph.core.instructions import (
    Accumulate,
    BeginUpdate,
    Collective,
    Compute,
    Free,
    Gather,
    Instruction,
    Move,
    Place,
    Reduce,
    Scale,
    Update,
    View,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.machine import Tier
from zerograph.core.plan import ParamTile, Residency, tile_label
from zerograph.core.segment_profile import SegmentProfile
from zerograph.core.step import Kind, layer_of


def stays_resident(residency: Residency, kind: str) -> bool:
    """Whether a bucket stays resident behind its last use in a program of that kind."""
    # After an inference no backward follows, and weights may have changed before the next call.
    return kind != "inference" and (residency == "step" or (residency == "backward" and kind != "backward"))


def ends_resident(residency: Residency, kind: str) -> bool:
    """Whether a bucket that stayed resident until a program of that kind is freed in it."""
    return residency == "backward" and kind == "backward"


@dataclass(frozen=True, slots=True)
class Segment:
    """A compiled piece, or one that would be.

    Attributes:
        digest: of its structure, equal for repeated layers; empty where nothing was compiled.
        operators: how many it has.
        flops: of its products and attention.
        moved: bytes it reads and writes.
        memory: bytes it holds while it runs; of what it is given by position.
        slices: equal parts that its work is done in, of which each ``Compute`` is one.
        packed: bytes of the matrices that it multiplies.
        attention: of its flops, those of fused attention.
    """

    digest: str
    operators: int
    flops: int = 0
    moved: int = 0
    memory: SegmentProfile = SegmentProfile()  # noqa: RUF009  immutable
    slices: int = 1
    packed: int = 0
    attention: int = 0


@dataclass(frozen=True, slots=True)
class Register:
    """The content of a register.

    Attributes:
        name: of the graph's node, the same in the forward that saves it and in the backward that reads it.
        bytes: of the memory it refers to.
        storage: the first register that refers to the same memory.
        kind: its role; a shard is "param", what a gather yields "gathered".
        tier: where that memory is.
    """

    name: str
    bytes: int
    storage: int
    kind: Kind
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class Program:
    """One graph, lowered, or one part of a step, coarsely.

    Attributes:
        kind: "forward", "backward", "inference" or "update".
        inputs: number of inputs; they fill registers 0, 1, ...
        registers: number of registers.
        outputs: per output its register, or None.
        segments: the distinct segments that ``Compute`` refers to.
        contents: what each register holds; empty in programs made by hand.
        buckets: their names, for people.
        carries: its registers are those of the program before it: what that leaves alive, it finds.
        given: registers that the step before has filled: gradients, by which the first program of this one updates.
    """

    kind: str
    inputs: int
    registers: int
    instructions: Sequence[Instruction]
    outputs: tuple[int | None, ...]
    segments: Sequence[Segment]
    contents: Sequence[Register] = ()
    buckets: Sequence[str] = ()
    carries: bool = False
    given: tuple[int, ...] = ()

    def collectives(self) -> Iterator[str]:
        """Every collective in order, one line each: what has to be the same on all ranks."""
        for instruction in self.instructions:
            if isinstance(instruction, Collective):
                for p in instruction.params:
                    how = "" if p.sharded else " whole"
                    gathers = instruction.operation == "gather"
                    dtype = (p.gather_wire or p.compute_dtype) if gathers else (p.reduce_wire or p.reduce_dtype)
                    # Names, and not sizes alone: different parameters of one size would be summed without an error.
                    rows = f" rows {p.begin} to {p.end}" if isinstance(p, ParamTile) else ""
                    what = f"{p.name}{rows} {list(p.shape)} {dtype}{how}"
                    yield f"{instruction.operation} bucket {instruction.bucket}: {what}"

    @property
    def trims(self) -> bool:
        """Whether memory that earlier gathers left free is of no use before the next forward: a backward gathers
        nothing anew."""
        again = any(isinstance(each, Gather) and not each.resident for each in self.instructions)
        return self.kind == "backward" and not again

    @property
    def names(self) -> frozenset[str]:
        """The parameters that it gathers or reduces."""
        return frozenset(p.name for each in self.instructions if isinstance(each, Collective) for p in each.params)

    @property
    def unread(self) -> tuple[int, ...]:
        """The inputs that nothing reads, and nothing returns."""
        used = {register for register in self.outputs if register is not None}
        for each in self.instructions:
            used.update(each.dead, each.reads)
        return tuple(register for register in range(self.inputs) if register not in used)

    @property
    def digest(self) -> str:
        """Hash of the sequence of collectives."""
        return hashlib.sha256("\n".join((self.kind, *self.collectives())).encode()).hexdigest()[:16]

    def label(self, instruction: Instruction) -> str:
        """The owner of ``instruction``, for people: a bucket, a tile of it, a layer, an activation."""
        match instruction:
            case Compute(module=module) | Place(module=module) | Accumulate(module=module) | Scale(module=module):
                return layer_of(module) or module or "outside of layers"
            case BeginUpdate(bucket=bucket):
                return self.buckets[bucket] if self.buckets else f"bucket {bucket}"
            case Gather() | WaitGather() | Free() | Reduce() | WaitReduce():
                name = self.buckets[instruction.bucket] if self.buckets else f"bucket {instruction.bucket}"
                return tile_label(name, instruction.tile, instruction.tiles)
            case Update() | WaitFetch() | View():
                return ""
            case _:
                return instruction.label

    def name(self, instruction: Instruction) -> str:
        """The name of ``instruction``, for people; nothing reads it to know what it is."""
        match instruction:
            case Compute():
                return f"{self.kind} {self.label(instruction)}"
            case Place() | Accumulate():
                return f"{self.kind} {self.label(instruction)}, end of a tile"
            case Scale():
                return f"{self.kind} {self.label(instruction)}, times a number"
            case Update():
                return "optimizer update"
            case BeginUpdate():
                return f"begin update of {self.label(instruction)}"
            case View():
                return "view"
            case Move():
                return f"{instruction.operation} {instruction.what} of {instruction.label}"
            case _:
                return f"{instruction.operation} {self.label(instruction)}"

    def module(self, instruction: Instruction) -> str:
        """The module that it works for."""
        match instruction:
            case Gather() | WaitGather() | Free() | Reduce() | WaitReduce() | BeginUpdate():
                return self.buckets[instruction.bucket] if self.buckets else ""
            case Update():
                return "optimizer"
            case WaitFetch() | View():
                return ""
            case _:
                return instruction.module

    def __str__(self) -> str:
        """The instructions, one line each, as a person reads them: the kind of each, and its owner."""
        each = enumerate(self.instructions)
        return "\n".join(f"{place:4d}  {type(one).__name__:<12} {self.label(one)}" for place, one in each)
