"""Activations that wait for the backward off the device: on NVMe or the host.

What the forward saves in their place are ordinary tensors: mappings of extents, or memory of the host. Nothing but
autograd and the user refers to them, so that their room is free when both have let go: after a backward, after the last
one of a graph that is retained, or when a loss is dropped.

The forward waits for no copy before its end. Memory is free when its copy is done and the next transfer begins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zerograph.core.errors import StorageError
from zerograph.core.machine import Tier
from zerograph.core.program import Program, Write
from zerograph.core.units import format_bytes
from zerograph.runtime.extents import ALIGNMENT, Extent
from zerograph.runtime.host import HostMemory, Transfer
from zerograph.runtime.nvme import Arena, Priority, Ticket
from zerograph.runtime.store import mapped_tensor
from zerograph.runtime.torch_private import memory_is_unshared

log = logging.getLogger(__name__)


def room_for(program: Program) -> int:
    """Bytes on NVMe that what ``program`` saves takes there."""
    moves = (i for i in program.instructions if isinstance(i, Write) and i.what == "activations")
    saved = (program.contents[register] for move in moves for register in dict.fromkeys(move.writes))
    homes = {content.storage: content.bytes for content in saved}
    return sum(map(_aligned, homes.values()))


class _Span(NamedTuple):
    """The bytes of one memory that some of a list of tensors look at, and their places in the list."""

    bytes: Tensor
    members: list[int]


class Returning(NamedTuple):
    """Tensors on their way back; ``away`` keeps the room that they come from."""

    here: list[Tensor]
    away: Sequence[Tensor]
    reads: list[tuple[Arena, Ticket]]
    copies: list[Transfer]


class _Slot(NamedTuple):
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
        self._slots: dict[int, list[_Slot]] = {}  # by bytes
        self._at: dict[int, _Slot] = {}  # by the address of its mapping
        self._on_host: dict[int, list[Tensor]] = {}  # by size
        self._leaving: list[Callable[[], None]] = []  # each waits for one
        self._told = False

    def spill(self, tensors: Sequence[Tensor], tier: Tier) -> list[Tensor]:
        """Begin to move ``tensors``, which nobody writes to any more; returns what stands for them.

        Raises:
            StorageError: a transfer failed.
        """
        found = list(tensors)
        for span in _spans(tensors):
            if _stays(tensors, span):
                continue
            home = self._to_nvme(span.bytes) if tier == "nvme" else self._to_host(span.bytes)
            if home is not None:
                for k in span.members:
                    found[k] = _as(tensors[k], span.bytes, home)
        return found

    def _to_nvme(self, source: Tensor) -> Tensor | None:
        slot = self._free_slot(source.nbytes)
        if slot is None:
            return None
        home = mapped_tensor(slot.arena, slot.extent, torch.uint8, (source.nbytes,))
        self._at[home.data_ptr()] = slot
        ticket = slot.arena.write(slot.extent, source)
        self._leaving.append(partial(slot.arena.wait, ticket))
        return home

    def _free_slot(self, size: int) -> _Slot | None:
        """Room for ``size`` bytes; None where there is none, which is told once."""
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
        if not self._told:
            self._told = True
            log.warning(
                "activations stay in memory where they do not find the %s on NVMe that one forward was planned to need:"
                " others wait for their backwards too, or the batch is larger; zerograph.backend(nvme=...) gives more",
                format_bytes(self.room),
            )
        return None

    def _new_slot(self, size: int) -> _Slot | None:
        if self.bytes + _aligned(size) <= self.room:
            for arena in self.arenas:
                with contextlib.suppress(StorageError):  # full, or in pieces
                    return _Slot(arena, arena.allocate(size))
        return None

    def let_go(self) -> None:
        """Free the extents in which nothing waits."""
        kept: dict[int, list[_Slot]] = {}
        for size, slots in self._slots.items():
            for slot in slots:
                if slot.is_free:
                    slot.arena.free(slot.extent)
                else:
                    kept.setdefault(size, []).append(slot)
        self._slots = kept
        there = {slot for slots in kept.values() for slot in slots}
        self._at = {address: slot for address, slot in self._at.items() if slot in there}

    def _to_host(self, source: Tensor) -> Tensor:
        host = self._host()
        assert host is not None  # where a plan has something there
        slots = self._on_host.setdefault(source.nbytes, [])
        home = next((slot for slot in slots if memory_is_unshared(slot)), None)
        if home is None:
            for size, others in self._on_host.items():  # of other shapes
                if size != source.nbytes:
                    others[:] = [slot for slot in others if not memory_is_unshared(slot)]
            home = host.room(source.nbytes)
            slots.append(home)
        self._leaving.append(host.start([(source, home)]).arrive)
        return home

    def fetch(self, away: Sequence[Tensor], tier: Tier) -> Returning:
        """Begin to bring back what ``away`` stand for; what was left on the device, or a hook has brought back, is
        there."""
        found = Returning(list(away), away, [], [])
        spans = (span for span in _spans(away) if not _stays(away, span))
        coming = [(span, self._slot_of(span.bytes) if tier == "nvme" else None) for span in spans]
        coming = [(span, slot) for span, slot in coming if tier != "nvme" or slot is not None]
        for span, slot in coming:
            target = _memory(span.bytes.nbytes)
            if slot is not None:
                found.reads.append((slot.arena, slot.arena.read(slot.extent, target, Priority.now)))
            else:
                host = self._host()
                assert host is not None
                found.copies.append(host.start([(span.bytes, target)]))
            for k in span.members:
                found.here[k] = _as(away[k], span.bytes, target)
        return found

    def finish(self, returning: Returning) -> list[Tensor]:
        """The tensors, back on the device.

        Raises:
            StorageError: a transfer failed.
        """
        for arena, ticket in returning.reads:
            arena.wait(ticket)
        for copy in returning.copies:
            copy.wait()
        return returning.here

    def wait(self) -> None:
        """Return when all that :meth:`spill` began is done: anyone may read then what stands for it, as hooks do.

        Raises:
            StorageError: a transfer failed.
        """
        while self._leaving:
            self._leaving.pop(0)()

    def abandon(self) -> None:
        """A program failed: wait for what leaves, whatever becomes of it."""
        while self._leaving:
            with contextlib.suppress(Exception):  # the first error is on its way to the caller
                self._leaving.pop()()

    @property
    def on_host(self) -> int:
        """Bytes on the host."""
        return sum(slot.nbytes for slots in self._on_host.values() for slot in slots)

    @property
    def bytes(self) -> int:
        """On NVMe."""
        slots = (slot for slots in self._slots.values() for slot in slots)
        return sum(slot.extent.room for slot in slots)

    def _slot_of(self, memory: Tensor) -> _Slot | None:
        """The slot that ``memory`` maps; None where it is something else."""
        address = memory.untyped_storage().data_ptr()
        slot = self._at.get(address)
        mapped = slot is not None and not slot.is_free and slot.arena.map(slot.extent).address == address
        return slot if mapped else None


def _spans(tensors: Iterable[Tensor]) -> Iterator[_Span]:
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
        yield _Span(torch.empty(0, dtype=torch.uint8).set_(storage, begin, (end - begin,), (1,)), members)


_WIDEST = torch.complex128.itemsize


def _stays(tensors: Sequence[Tensor], span: _Span) -> bool:
    """Whether one of them is the imaginary part of a conjugate: no public operator makes such a view of a copy."""
    return any(tensors[k].is_neg() for k in span.members)


def _as(tensor: Tensor, source: Tensor, memory: Tensor) -> Tensor:
    """What ``tensor`` is in ``source``, in a copy of that in other ``memory``."""
    begin = tensor.storage_offset() * tensor.itemsize - source.storage_offset() + memory.storage_offset()
    found = torch.empty(0, dtype=tensor.dtype).set_(
        memory.untyped_storage(), begin // tensor.itemsize, tensor.shape, tensor.stride()
    )
    return found.conj() if tensor.is_conj() else found


def _memory(size: int) -> Tensor:
    """Memory for what comes back, where the disk writes to it directly.

    Each tensor has its own, as before it left: it takes the place that another layer's has left behind, and goes when
    it is read last.
    """
    room = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    begin = -room.data_ptr() % ALIGNMENT
    return room[begin : begin + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
