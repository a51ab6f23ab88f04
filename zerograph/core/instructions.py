"""The instructions of programs: plain data that describe themselves.

Registers are integers; an instruction names those it reads and writes, those that are dead after it, and the stream
that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from zerograph.core.machine import LINKS, TIERS, Tier, is_disk
from zerograph.core.plan import Param
from zerograph.core.slots import LEAVING
from zerograph.core.timeline import Operation, Stream


class _Instruction:
    """The facts that each class of instructions states about itself.

    Attributes:
        stream: that it occupies; None where it occupies none.
        operation: what it does.
    """

    __slots__ = ()
    stream: ClassVar[Stream | None] = None
    operation: ClassVar[Operation]


class _Making(_Instruction):
    """An instruction that writes one register, ``out``."""

    __slots__ = ()
    out: int

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True)
class Compute(_Instruction):
    """Run segment ``segment`` (an index into :attr:`Program.segments`) on what it ``reads``.

    Attributes:
        token_tiles: into how many tiles of tokens the plan divides work of the region that it is of, of which it is
            one, or in a coarse program all.
    """

    stream = "compute"
    operation = "compute"
    segment: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...] = ()
    module: str = ""
    source: str = ""
    token_tiles: int = 1


@dataclass(frozen=True, slots=True)
class View(_Making):
    """Look at a part of what ``source`` holds: along ``dim``, from ``begin`` to before ``end``."""

    operation = "compute"
    source: int
    out: int
    dim: int
    begin: int
    end: int
    dead: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(frozen=True, slots=True)
class _TileEnd(_Making):
    """The end of a tile: its results go into the tensor ``out`` of all tiles, which the first of them makes.

    Attributes:
        terms: what the tile made.
        flops, moved: of its product, and bytes read and written.
        packed: bytes of the matrices that it multiplies.
    """

    stream = "compute"
    operation = "compute"
    terms: tuple[int, ...]
    out: int
    first: bool
    dead: tuple[int, ...] = ()
    flops: int = 0
    moved: int = 0
    packed: int = 0
    module: str = ""
    source: str = ""

    @property
    def reads(self) -> tuple[int, ...]:
        return self.terms if self.first else (*self.terms, self.out)


@dataclass(frozen=True, slots=True)
class Place(_TileEnd):
    """Copy the one term into ``out``: along ``dim``, from ``begin`` on, as far as there is room.

    Attributes:
        shape: of ``out``; a size of -1 is the term's.
    """

    shape: tuple[int, ...] = ()
    dim: int = 0
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Accumulate(_TileEnd):
    """Add the one term, or the matrix product of two, to ``out``, in place.

    Attributes:
        dtype: of ``out``.
    """

    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Scale(_Making):
    """Multiply ``source`` by the number ``by``; ``out`` is in its memory, unless somebody else has that too."""

    stream = "compute"
    operation = "compute"
    source: int
    by: int
    out: int
    dead: tuple[int, ...] = ()
    moved: int = 0
    module: str = ""

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source, self.by)


@dataclass(frozen=True, slots=True)
class _Collective(_Making):
    """The start of a collective of a bucket's parameters, or of a tile of it; ``out`` holds the pending transfer."""

    bucket: int
    params: tuple[Param, ...]
    reads: tuple[int, ...]
    out: int
    dead: tuple[int, ...] = ()
    bytes: int = 0
    tile: int = 0
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class Gather(_Collective):
    """Start the all-gather of shards.

    A bucket that is unsharded already is not gathered again. ``bytes`` are what all ranks send together.

    Attributes:
        fetched: whether an instruction before it has brought the shards of its bucket to the device.
        resident: whether the bucket is resident from the forward on.
        inside: whether the ranks of a host gather what they kept of it, and nothing comes from others.
        ended: bytes of this rank's part of that, where no later gather needs it.
    """

    stream = "gather"
    operation = "gather"
    fetched: bool = False
    resident: bool = False
    inside: bool = False
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Reduce(_Collective):
    """Start the reduction of full gradients over ranks; ``bytes`` are those that are summed, and ``averaged`` those of
    a rank's sums, of which replicas take the average."""

    averaged: int = 0

    stream = "reduce"
    operation = "reduce"


@dataclass(frozen=True, slots=True)
class _Wait(_Instruction):
    """Wait for a transfer; what it ``writes`` are parts of what that filled, in its memory."""

    pending: int
    writes: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.pending,)


@dataclass(frozen=True, slots=True)
class WaitFetch(_Wait):
    """Wait for what was read or fetched, and is needed next.

    Attributes:
        by_gather: whether a gather waits in its stream, and what computes does not.
    """

    operation = "fetch"
    by_gather: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketWait(_Wait):
    """Wait for a collective of a bucket, or of a tile of it."""

    bucket: int
    tile: int = 0
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class WaitGather(_BucketWait):
    """Wait for a gather, which ``writes`` the full parameters, ``resident`` for a later program or not.

    Attributes:
        kept: bytes that came to this rank from all hosts and stay, as its part of what its host keeps.
    """

    operation = "gather"
    resident: bool = False
    kept: int = 0


@dataclass(frozen=True, slots=True)
class WaitReduce(_BucketWait):
    """Wait for a reduction, which ``writes`` this rank's shards of the averaged gradients.

    Attributes:
        leaves: whether moves behind it offload gradients of its bucket.
        updatable: places among the ``writes`` of whole gradients that stay in this memory, so that an update inside of
            the backward may take them here.
    """

    operation = "reduce"
    leaves: bool = False
    updatable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Free(_Instruction):
    """Let go of a bucket's full parameters, which it ``reads``.

    Attributes:
        resident: whether the bucket stays resident for a later program.
        ends: whether it was resident until this one, and no later program finds it.
        kept: whether the shards of a lone rank, which are the parameters, stay for an update inside of the backward.
    """

    operation = "free"
    writes: ClassVar[tuple[int, ...]] = ()
    bucket: int
    reads: tuple[int, ...]
    dead: tuple[int, ...] = ()
    resident: bool = False
    tile: int = 0
    tiles: int = 1
    ends: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True)
class BeginUpdate(_Instruction):
    """Nothing of this backward works for the bucket any more: an optimizer that updates inside of it begins here."""

    operation = "update"
    reads: ClassVar[tuple[int, ...]] = ()
    writes: ClassVar[tuple[int, ...]] = ()
    bucket: int
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Update(_Instruction):
    """The optimizer's pass over what lives on the device; ``sizes`` are the bytes it reads and writes, by parameter."""

    stream = "compute"
    operation = "update"
    writes: ClassVar[tuple[int, ...]] = ()
    buckets: tuple[int, ...]
    sizes: tuple[int, ...]
    reads: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes on their way from one tier to a neighbour; to others they take several moves, through a staging buffer.

    Attributes:
        source, target: a pair of :data:`~zerograph.core.machine.LINKS`.
        what: is moved: "shard", "gradient", "states", "parameters" or "activations".
        label: whose, for people: a bucket, a tile of it, a layer or an activation.
        module: that it belongs to.
        bytes: of this rank.
        bucket, tile: -1 and 0 of activations.
        slot: the register that stands for its staging buffer: it waits for all that worked in what was there before.
        params: that the shards or gradients are of, in the order of the registers; none in coarse programs.
        offload_tier: of a shard, a gradient or an activation, where it lives off the device.
        complete: whether behind it whole gradients have left the device, and not only a tile of one.
        kept: whether an update inside of the backward has the shards in memory that this brings from a disk, and does
            not read them again.
    """

    source: Tier
    target: Tier
    what: str
    label: str
    module: str
    bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...] = ()
    bucket: int = -1
    tile: int = 0
    slot: int | None = None
    params: tuple[Param, ...] = ()
    offload_tier: Tier | None = None
    complete: bool = False
    kept: bool = False

    @property
    def operation(self) -> Operation:
        """Its name for people and viewers."""
        if is_disk(self.source) or is_disk(self.target):
            return "read" if self.rises else "write"
        return "fetch" if self.rises else "spill"

    @property
    def stream(self) -> Stream:
        """The stream that it occupies."""
        return LINKS[self.source, self.target]

    @property
    def rises(self) -> bool:
        """Whether it comes nearer to the device."""
        return TIERS.index(self.target) < TIERS.index(self.source)

    @property
    def staged(self) -> bool:
        """Whether it moves between the device and a staging buffer, and another move between that and the tier."""
        return self.offload_tier is not None and self.offload_tier not in (self.source, self.target)


@dataclass(frozen=True, slots=True)
class _OffloadedUpdate(_Instruction):
    """The optimizer's pass over a bucket or tile whose states live off the device.

    Attributes:
        label, module, slot: as :class:`Move` has them.
        bytes: that are read and written, on this rank.
        updated: how many parameters these are of.
        tiles: that updates of the bucket divide it into.
    """

    operation = "update"
    what: ClassVar[str] = "states"
    label: str
    module: str
    bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...] = ()
    bucket: int = -1
    tile: int = 0
    slot: int | None = None
    updated: int = 0
    tiles: int = 1


class HostUpdate(_OffloadedUpdate):
    """On the host, beside its states."""

    __slots__ = ()
    stream = "cpu_update"


class DeviceUpdate(_OffloadedUpdate):
    """On the device, of states that came from the host and go back there."""

    __slots__ = ()
    stream = "compute"


OffDevice = Move | HostUpdate | DeviceUpdate
Collective = Gather | Reduce
Wait = WaitGather | WaitReduce | WaitFetch
TileEnd = Place | Accumulate
Computing = Compute | Update | TileEnd | Scale
"""Instructions that compute, and belong to no bucket."""
Timed = Computing | Collective | OffDevice
"""Instructions that occupy a stream."""
Instruction = Timed | Wait | Free | View | BeginUpdate


def last_work(instructions: Iterable[Instruction]) -> dict[int, int]:
    """By bucket the place of the last instruction that works for it; -1 stands for those that work for none."""
    return {getattr(each, "bucket", -1): place for place, each in enumerate(instructions)}


def kept_shards(backward: Sequence[Instruction], begins: Mapping[int, int]) -> dict[int, int]:
    """By bucket the place of the move from a disk that brings what an update inside of ``backward`` reads again.

    It stays in memory for the update where that is near: at most :data:`~zerograph.core.slots.LEAVING` others begin
    between the bucket's last use and its own. A tied weight's would stay for most of the backward.

    Args:
        begins: by bucket the place behind which its update begins.
    """
    moves, frees, resident = dict[int, int](), dict[int, int](), set[int]()
    for place, each in enumerate(backward):
        if isinstance(each, Move) and each.what == "shard" and is_disk(each.source):
            moves[each.bucket] = place
        elif isinstance(each, Free):
            frees[each.bucket] = place
        elif isinstance(each, Gather) and each.resident:
            resident.add(each.bucket)
    found = dict[int, int]()
    for bucket, begin in begins.items():
        if bucket in moves and bucket in frees and bucket not in resident:
            others = sum(frees[bucket] < other < begin for other in begins.values())
            found |= {bucket: moves[bucket]} if others <= LEAVING else {}
    return found
