"""A program: the instructions that one forward or backward executes, as plain data.

Registers are integers; an instruction names those it reads and writes and those that are dead after it. The executor
runs this list, telemetry times it, and nothing in here knows FX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from zerograph.core.plan import Param
from zerograph.core.step import Kind
from zerograph.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Compute:
    """Run segment ``segment`` (an index into :attr:`Program.segments`) on ``args``."""

    segment: int
    args: tuple[int, ...]
    outs: tuple[int, ...]
    dead: tuple[int, ...] = ()
    module: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Gather:
    """Start the all-gather of ``params`` of a bucket; ``out`` holds the pending transfer."""

    bucket: int
    params: tuple[Param, ...]
    shards: tuple[int, ...]
    out: int
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitGather:
    """Wait for a gather; ``outs`` are the full parameters."""

    bucket: int
    pending: int
    outs: tuple[int, ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of a bucket's full parameters."""

    bucket: int
    params: tuple[int, ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the reduction of a bucket's full gradients over ranks."""

    bucket: int
    params: tuple[Param, ...]
    grads: tuple[int, ...]
    out: int
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitReduce:
    """Wait for a reduction; ``outs`` are this rank's shards of the averaged gradients."""

    bucket: int
    pending: int
    outs: tuple[int, ...]
    dead: tuple[int, ...] = ()


Instruction = Compute | Gather | WaitGather | Free | Reduce | WaitReduce


@dataclass(frozen=True, slots=True)
class Segment:
    """A compiled piece.

    Attributes:
        digest: of its structure, equal for repeated layers.
        operators: how many it has.
        flops: of its products.
        moved: bytes it reads and writes.
        temporary: bytes it holds of its own at a time, besides inputs and outputs.
    """

    digest: str
    operators: int
    flops: int = 0
    moved: int = 0
    temporary: int = 0


@dataclass(frozen=True, slots=True)
class Register:
    """What a register holds.

    Attributes:
        name: of the graph's node, the same in the forward that saves it and in the backward that reads it.
        bytes: of the memory it refers to.
        storage: the first register that refers to the same memory.
        kind: its role; a shard is "param", what a gather yields "gathered".
    """

    name: str
    bytes: int
    storage: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Program:
    """One graph, lowered.

    Attributes:
        kind: "forward", "backward" or "inference".
        inputs: number of inputs; they fill registers 0, 1, ...
        registers: number of registers.
        outputs: per output its register, or None.
        segments: the distinct segments that ``Compute`` refers to.
        contents: what each register holds; empty in programs made by hand.
    """

    kind: str
    inputs: int
    registers: int
    instructions: tuple[Instruction, ...]
    outputs: tuple[int | None, ...]
    segments: tuple[Segment, ...]
    contents: tuple[Register, ...] = ()

    def collectives(self) -> Iterator[str]:
        """Every collective in order, one line each: what has to be the same on all ranks."""
        for step in self.instructions:
            if isinstance(step, (Gather, Reduce)):
                verb = type(step).__name__.lower()
                for p in step.params:
                    how = "" if p.sharded else " whole"
                    dtype = p.compute_dtype if verb == "gather" else p.reduce_dtype
                    yield f"{verb} bucket {step.bucket}: {p.name} {list(p.shape)} {dtype}{how}"

    @property
    def digest(self) -> str:
        """Hash of the sequence of collectives."""
        return hashlib.sha256("\n".join((self.kind, *self.collectives())).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The instructions, one line each, as a person reads them."""
        return "\n".join(f"{i:4d}  {_describe(step)}" for i, step in enumerate(self.instructions))


def _describe(step: Instruction) -> str:
    match step:
        case Compute():
            return f"compute      segment {step.segment}  ({len(step.args)} in, {len(step.outs)} out)"
        case Gather():
            size = sum(p.gathered_bytes for p in step.params)
            return f"gather       bucket {step.bucket}  {len(step.params)} parameters, {format_bytes(size)}"
        case Reduce():
            return f"reduce       bucket {step.bucket}  {len(step.params)} gradients"
        case WaitGather():
            return f"wait gather  bucket {step.bucket}"
        case WaitReduce():
            return f"wait reduce  bucket {step.bucket}"
        case Free():
            return f"free         bucket {step.bucket}"
