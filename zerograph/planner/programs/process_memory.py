"""How much the process of a CPU rank grows while it trains: the forecast's peak, and what no forecast counts. No torch.

On an accelerator the growth of the process says nothing about the step: tensors are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerograph.core.instructions import Compute, Free, Gather, Reduce, WaitGather, WaitReduce
from zerograph.core.param_bytes import copy_bytes
from zerograph.core.program import Program
from zerograph.core.step import ITEM_SIZE, Param
from zerograph.core.units import format_bytes

COMPILERS, PER_OPERATOR = 80 * 2**20, 32 * 2**10
"""Measured as what is left of the growth in GPTs of width 64, whose tensors are small, with torch 2.13, Python 3.11 and
warm caches: 87, 151, 187 and 196 MiB for 382, 1802, 3506 and 2304 operators (2, 12 and 24 layers; 12 recomputed), 10 to
20 of them the allocator's. Half are Python's arenas, which compiling fills and never empties, the rest C++ objects and
loaded code.
"""

FRAGMENTATION = 0.2
"""A share of the peak. Measured at eight GPTs of 2.5 GiB of states (12 layers of 1024, 16 of 896, 8 of 1280; stages 1
to 3): 0.1 to 0.33, most where tensors are few and large, 0.21 on average. glibc serves tensors of up to 32 MiB from its
heap, where reduced gradients are allocated among the activations that the backward frees. Given back after the first
step (``malloc_trim``), it is there again a few steps later.
"""

_LINE, _HEADER, _PAGE, _CONTROL = 64, 32, 4096, 65 * 4096
"""csrc/mailbox.cc: what pieces are aligned to (the header of a message takes as much), the header of a piece, the least
step of blocks, and a rank's own page."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that a process grows by, from before its model is built to the peak of a step.

    Attributes:
        peak: what is accounted for: the forecast's peak.
        transport: memory that ranks of one host exchange messages through, this rank's and its peers', which it maps.
            There is none with ``ZEROGRAPH_TRANSPORT=group`` or on several hosts.
        compilers: an allowance for torch's compilers, what they leave behind, and the code that they load.
        allocator: an allowance for free memory between what is in use, which malloc keeps.
    """

    peak: int
    transport: int
    compilers: int
    allocator: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.peak + self.transport + self.compilers + self.allocator

    def __str__(self) -> str:
        return (
            f"the process grows by about {format_bytes(self.bytes)}: the peak, {format_bytes(self.transport)} of "
            f"messages, {format_bytes(self.compilers)} for compilers, {format_bytes(self.allocator)} that malloc keeps"
        )


def process_growth(programs: Sequence[Program], peak: int, world_size: int) -> Resident:
    """The growth of a process of one of ``world_size`` ranks that runs ``programs``, whose accounted bytes are at most
    ``peak``."""
    operators = sum(
        program.segments[instruction.segment].operators
        for program in programs
        for instruction in program.instructions
        if isinstance(instruction, Compute)
    )
    return Resident(
        peak, transport_bytes(programs, world_size), COMPILERS + PER_OPERATOR * operators, int(FRAGMENTATION * peak)
    )


def transport_bytes(programs: Sequence[Program], world_size: int) -> int:
    """Shared memory through which CPU ranks of one host exchange the messages of ``programs``.

    Follows ``Mailbox::acquire`` (csrc/mailbox.cc): a message takes a block when its collective starts, and the block is
    free again when all ranks have read it. Peers are taken to be a segment behind at most; one that is later costs
    another block, which is kept.
    """
    if world_size == 1:
        return 0
    blocks = _Blocks()
    for _ in range(2):  # blocks stay, and the second step finds others free
        # Between steps nothing stays resident, so each begins with no bucket.
        unsharded: set[int] = set()
        for program in programs:
            _exchange(program, blocks, unsharded)
    return world_size * (sum(blocks.sizes) + _CONTROL)


def _exchange(program: Program, blocks: _Blocks, unsharded: set[int]) -> None:
    """The messages of ``program``; buckets that are ``unsharded`` already are not gathered."""
    for instruction in program.instructions:
        match instruction:
            case Gather(bucket=bucket, params=params, out=out):
                if bucket not in unsharded:
                    blocks.take(out, _gathered(params))
                unsharded.add(bucket)
            case Free(bucket=bucket, resident=resident):
                if not resident:
                    unsharded.discard(bucket)
            case Reduce(params=params, out=out):
                for size in _reduced(params):
                    blocks.take(out, size)
            case WaitGather(pending=pending) | WaitReduce(pending=pending):
                blocks.read(pending)
            case Compute():
                # Peers are taken to be a segment behind at most.
                blocks.reclaim()


class _Blocks:
    """The blocks of one rank, by index."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._free: set[int] = set()
        self._taken: dict[int, list[int]] = {}  # by the register of the pending collective
        self._read: list[int] = []

    def take(self, pending: int, size: int) -> None:
        # As csrc/mailbox.cc does: the smallest block that fits, and none that is far too large.
        fits = [i for i in self._free if size <= self.sizes[i] <= 8 * size + 2**20]
        if fits:
            chosen = min(fits, key=self.sizes.__getitem__)
            self._free.remove(chosen)
        else:
            chosen = len(self.sizes)
            self.sizes.append(_aligned(size, max(_PAGE, (1 << size.bit_length() - 1) // 8)))
        self._taken.setdefault(pending, []).append(chosen)

    def read(self, pending: int) -> None:
        """This rank has finished a collective."""
        self._read += self._taken.pop(pending, [])

    def reclaim(self) -> None:
        """So have its peers."""
        self._free.update(self._read)
        self._read.clear()


def _gathered(params: Sequence[Param]) -> int:
    """This rank's shards."""
    return _message(params, (copy_bytes(p) for p in params))


def _reduced(params: Sequence[Param]) -> Iterator[int]:
    """A slice of each gradient to every peer; the sums of unsharded ones then go to all."""
    for sharded in (True, False):
        some = [p for p in params if p.sharded == sharded]
        if some:
            chunks = [p.summed_elements for p in some]
            sent = [chunk * _sent_item(p) for chunk, p in zip(chunks, some, strict=True)]
            yield _message(some, sent * (some[0].home.ranks - 1))
            if not sharded:
                yield _message(some, (c * ITEM_SIZE[p.dtype] for c, p in zip(chunks, some, strict=True)))


def _sent_item(param: Param) -> int:
    return 8 if param.reduce_dtype == "float64" else ITEM_SIZE[param.compute_dtype]


def _message(params: Sequence[Param], pieces: Iterator[int] | list[int]) -> int:
    return _aligned(_LINE + len(params) * _HEADER, _LINE) + sum(_aligned(piece, _LINE) for piece in pieces)


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit
