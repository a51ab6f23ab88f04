"""Activations that wait for the backward off the device: on NVMe or the host.

In their place the forward saves ordinary tensors: mappings of extents, or memory of the host. Nothing but autograd and
the user refers to them, so that their room is free when both have let go: after a backward, after the last one of a
graph that is retained, or when a loss is dropped.

The forward waits for no write before its end. Memory is free when its copy is done and the next transfer begins.
Where the host has another memory than the device, what goes to NVMe and comes from there passes through it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zerograph.core.errors import StorageError
from zerograph.core.instructions import Move
from zerograph.core.machine import Tier, is_disk
from zerograph.core.program import Program
from zerograph.core.slots import LEAVING, SLOTS
from zerograph.core.units import format_bytes
from zerograph.runtime.offload.extents import ALIGNMENT, Extent
from zerograph.runtime.offload.host import HostMemory, Transfer
from zerograph.runtime.offload.nvme import Arena, Priority, Ticket
from zerograph.runtime.offload.store import mapped_tensor
from zerograph.runtime.timings import Purpose
from zerograph.runtime.torch_private import memory_is_unshared

log = logging.getLogger(__name__)


def room_for(program: Program) -> int:
    """Bytes on NVMe that what ``program`` saves takes there."""
    moves = (i for i in program.instructions if isinstance(i, Move) and i.what == "activations" and is_disk(i.target))
    saved = (program.contents[register] for move in moves for register in dict.fromkeys(move.writes))
    placement = {content.storage: content.bytes for content in saved}
    return sum(map(_aligned, placement.values()))


class _SharedBytes(NamedTuple):
    """The bytes of one memory that some of a list of tensors look at, and their places in the list."""

    bytes: Tensor
    members: list[int]


class Returning(NamedTuple):
    """Tensors on their way back; ``offloaded`` keeps the room that they come from."""

    here: list[Tensor]
    offloaded: Sequence[Tensor]
    reads: list[tuple[Arena, Ticket]]
    copies: list[Transfer]


class _SavedExtent(NamedTuple):
    """An extent and where it is."""

    arena: Arena
    extent: Extent

    @property
    def is_free(self) -> bool:
        return not self.arena.is_mapped(self.extent)


class SavedActivations:
    """Those of one backend.

    Attributes:
        arenas: where they go on NVMe.
        room: bytes that they may take there.
    """

    def __init__(self, host: Callable[[], HostMemory | None]) -> None:
        """``host`` is asked for when something goes there."""
        self._host = host
        self.arenas: list[Arena] = []
        self.room = 0
        self._slots: dict[int, list[_SavedExtent]] = {}  # by bytes
        self._at: dict[int, _SavedExtent] = {}  # by the address of its mapping
        self._on_host: dict[int, list[Tensor]] = {}  # by size
        self._copies: deque[list[Transfer]] = deque()  # to the host, by layer
        self._writes: deque[list[Callable[[], None]]] = deque()  # each waits for one
        self._rising: list[Transfer] = []
        self._warned = False

    def spill(self, tensors: Sequence[Tensor], tier: Tier, whose: str = "") -> list[Tensor]:
        """Begin to move ``tensors``, which nobody writes to any more; returns what stands for them.

        To NVMe they go from the host's memory, to which an earlier call has brought them where it is not the device's.
        Recordings name ``whose`` they are.

        Raises:
            StorageError: a transfer failed.
        """
        found = list(tensors)
        begun = self._one_more_to(tier)
        for span in _spans(tensors):
            if _stays(tensors, span):
                continue
            placed = self._to_nvme(span.bytes, whose) if is_disk(tier) else self._to_host(span.bytes, whose)
            if placed is not None:
                for k in span.members:
                    found[k] = _as(tensors[k], span.bytes, placed)
        if not begun[-1]:
            begun.pop()  # the last one is what others are waited for by
        return found

    def _one_more_to(self, tier: Tier) -> deque[list[Any]]:
        """Make way for the tensors of one more layer; returns all that is under way to ``tier``, and a place for it."""
        if tier == "host":
            for copy in _taken(self._copies, LEAVING - 1):
                copy.wait()
        elif self._host() is not None:  # else they are in memory as they would be without
            for written in _taken(self._writes, SLOTS - 1):
                written()
        begun: deque[list[Any]] = self._copies if tier == "host" else self._writes
        begun.append([])
        return begun

    def _to_nvme(self, source: Tensor, whose: str) -> Tensor | None:
        slot = self._free_slot(source.nbytes)
        if slot is None:
            return None
        placed = mapped_tensor(slot.arena, slot.extent, torch.uint8, (source.nbytes,))
        self._at[placed.data_ptr()] = slot
        self._writes[-1].append(self._write(slot, source, Purpose("activations", whose)))
        return placed

    def _write(self, slot: _SavedExtent, source: Tensor, purpose: Purpose) -> Callable[[], None]:
        """Begin to write ``source``, which may be on its way to the host; returns what waits for that."""
        host = self._host()
        if host is None:
            return partial(slot.arena.wait, slot.arena.write(slot.extent, source, purpose=purpose))
        tickets: list[Ticket] = []
        begun = host.after_copies(lambda: tickets.append(slot.arena.write(slot.extent, source, purpose=purpose)))

        def written() -> None:
            begun.result()
            slot.arena.wait(tickets[0])

        return written

    def _free_slot(self, size: int) -> _SavedExtent | None:
        """Room for ``size`` bytes; None where there is none, of which one warning is logged."""
        found = next((slot for slot in self._slots.get(size, ()) if slot.is_free), None)
        if found is not None:
            return found
        found = self._new_slot(size)
        if found is None:
            self.let_go()  # what other shapes have left
            found = self._new_slot(size)
        if found is not None:
            self._slots.setdefault(size, []).append(found)
            return found
        if not self._warned:
            self._warned = True
            log.warning(
                "activations stay in memory where they do not find the %s on NVMe that one forward was planned to need:"
                " others wait for their backwards too, or the batch is larger; zerograph.backend(nvme=...) gives more",
                format_bytes(self.room),
            )
        return None

    def _new_slot(self, size: int) -> _SavedExtent | None:
        if self.bytes + _aligned(size) <= self.room:
            for arena in self.arenas:
                with contextlib.suppress(StorageError):  # full, or in pieces
                    return _SavedExtent(arena, arena.allocate(size))
        return None

    def let_go(self) -> None:
        """Free the extents in which nothing waits."""
        remaining: dict[int, list[_SavedExtent]] = {}
        for size, slots in self._slots.items():
            for slot in slots:
                if slot.is_free:
                    slot.arena.free(slot.extent)
                else:
                    remaining.setdefault(size, []).append(slot)
        self._slots = remaining
        there = {slot for slots in remaining.values() for slot in slots}
        self._at = {address: slot for address, slot in self._at.items() if slot in there}

    def _to_host(self, source: Tensor, whose: str) -> Tensor:
        host = self._host()
        assert host is not None  # where a plan has something there
        slots = self._on_host.setdefault(source.nbytes, [])
        placed = next((slot for slot in slots if memory_is_unshared(slot)), None)
        if placed is None:
            for size, others in self._on_host.items():  # of other shapes
                if size != source.nbytes:
                    others[:] = [slot for slot in others if not memory_is_unshared(slot)]
            placed = host.room(source.nbytes)
            slots.append(placed)
        self._copies[-1].append(host.start("d2h", [(source, placed)], purpose=Purpose("activations", whose)))
        return placed

    def fetch(self, offloaded: Sequence[Tensor], tier: Tier, whose: str = "") -> Returning:
        """Begin to bring back what ``offloaded`` stand for; what was left on the device, or a hook has brought back, is
        there."""
        found, purpose = Returning(list(offloaded), offloaded, [], []), Purpose("activations", whose)
        if tier == "host":
            return self.copy_up(found, whose)
        for span in _spans(offloaded):
            slot = None if _stays(offloaded, span) else self._slot_of(span.bytes)
            if slot is not None:
                host, size = self._host(), span.bytes.nbytes
                target = host.stage(size) if host is not None else _memory(size)
                found.reads.append((slot.arena, slot.arena.read(slot.extent, target, Priority.now, purpose=purpose)))
                for k in span.members:
                    found.here[k] = _as(offloaded[k], span.bytes, target)
        return found

    def copy_up(self, returning: Returning, whose: str = "") -> Returning:
        """Begin to copy to the device what is on the host, or is read to there. Recordings name ``whose`` it is."""
        host = self._host()
        assert host is not None  # where a plan has something there
        found = Returning(list(returning.here), returning.offloaded, [], [])
        for span in _spans(returning.here):
            # On an accelerator a hook may have brought it back to there.
            if _stays(returning.here, span) or not span.bytes.is_cpu:
                continue
            target = _memory(span.bytes.nbytes) if host.device.type == "cpu" else host.above(span.bytes.nbytes)
            arrived = partial(_wait_for, returning.reads) if returning.reads else None
            own = Purpose("activations", whose)
            found.copies.append(host.start("h2d", [(span.bytes, target)], arrived, purpose=own))
            for k in span.members:
                found.here[k] = _as(returning.here[k], span.bytes, target)
        self._rising += found.copies
        return found

    def finish(self, returning: Returning) -> list[Tensor]:
        """The tensors, back on the device.

        Raises:
            StorageError: a transfer failed.
        """
        _wait_for(returning.reads)
        for copy in returning.copies:
            copy.wait()
            self._rising.remove(copy)
        return returning.here

    def wait(self) -> None:
        """Return when all that :meth:`spill` began is done: anyone may read then what stands for it, as hooks do.

        Raises:
            StorageError: a transfer failed.
        """
        for copy in _taken(self._copies):
            copy.arrive()
        for written in _taken(self._writes):
            written()

    def abandon(self) -> None:
        """A program failed: wait for what is under way, whatever becomes of it."""
        waits = [copy.arrive for copy in (*_taken(self._copies), *_taken(deque([self._rising])))]
        for wait in (*waits, *_taken(self._writes)):
            with contextlib.suppress(Exception):  # the first error is on its way to the caller
                wait()

    @property
    def on_host(self) -> int:
        """Bytes on the host."""
        return sum(slot.nbytes for slots in self._on_host.values() for slot in slots)

    @property
    def bytes(self) -> int:
        """On NVMe."""
        slots = (slot for slots in self._slots.values() for slot in slots)
        return sum(slot.extent.room for slot in slots)

    def _slot_of(self, memory: Tensor) -> _SavedExtent | None:
        """The slot that ``memory`` maps; None where it is something else."""
        address = memory.untyped_storage().data_ptr()
        slot = self._at.get(address)
        mapped = slot is not None and not slot.is_free and slot.arena.map(slot.extent).address == address
        return slot if mapped else None


T = TypeVar("T")


def _taken(begun: deque[list[T]], most: int = 0) -> Iterator[T]:
    """Take out what began first, of all layers but ``most``."""
    while len(begun) > most:
        while begun[0]:
            yield begun[0].pop(0)
        begun.popleft()


def _wait_for(reads: Iterable[tuple[Arena, Ticket]]) -> None:
    for arena, ticket in reads:
        arena.wait(ticket)


def _spans(tensors: Iterable[Tensor]) -> Iterator[_SharedBytes]:
    """Each memory that ``tensors`` look at, from the first byte to the last; what is empty has none."""
    found: dict[int, tuple[int, int, list[int]]] = {}
    tensors = list(tensors)
    for k, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        first = int(tensor.storage_offset()) * tensor.itemsize
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        key = tensor.untyped_storage().data_ptr()
        begin, end, members = found.get(key, (first, 0, []))
        found[key] = min(begin, first), max(end, first + (steps + 1) * tensor.itemsize), [*members, k]
    for begin, end, members in found.values():
        begin -= begin % _WIDEST  # so that elements of any dtype begin at whole ones of it
        storage = tensors[members[0]].untyped_storage()
        yield _SharedBytes(_looking_at(storage, torch.uint8).set_(storage, begin, (end - begin,), (1,)), members)


def _looking_at(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """A tensor that may be set to a part of ``storage``."""
    return torch.empty(0, dtype=dtype, device=storage.device)


_WIDEST = torch.complex128.itemsize


def _stays(tensors: Sequence[Tensor], span: _SharedBytes) -> bool:
    """Whether one of them is the imaginary part of a conjugate: no public operator makes such a view of a copy."""
    return any(tensors[k].is_neg() for k in span.members)


def _as(tensor: Tensor, source: Tensor, memory: Tensor) -> Tensor:
    """``tensor``, a view of ``source``, as the same view of a copy in other ``memory``."""
    begin = tensor.storage_offset() * tensor.itemsize - source.storage_offset() + memory.storage_offset()
    storage = memory.untyped_storage()
    found = _looking_at(storage, tensor.dtype).set_(storage, begin // tensor.itemsize, tensor.shape, tensor.stride())
    return found.conj() if tensor.is_conj() else found


def _memory(size: int) -> Tensor:
    """Memory for what comes back, where the disk writes to it directly.

    Each tensor has its own, as before it left: it takes the place that another layer's has left behind, and goes when
    it is read last.
    """
    room = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu")
    begin = -room.data_ptr() % ALIGNMENT
    return room[begin : begin + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
