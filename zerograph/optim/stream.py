"""The update of parameters whose states are on NVMe: read, update, write, in chunks through a ring of slots.

While one chunk is updated, the next ones are read and the one before is written. The first ones are read before, but
for their gradients, while a backward runs. Parameters that this has read are copied from there. Beside a device with
another memory than the host's, gradients that stayed there come to the slots too, and copies that are gathered are
brought from them what was updated.

Chunks are cut from the buckets' own order, whatever groups their parameters are in: a transfer at a chunk's edge then
never touches what another chunk has.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

import zerograph._core as _core
from zerograph.core.errors import StorageError
from zerograph.core.machine import Way
from zerograph.core.slots import SLOTS
from zerograph.optim.parts import Member, Part, flat, tensor_set
from zerograph.optim.ring import through_slots
from zerograph.optim.tensors import TAGS, Gradients
from zerograph.runtime.comm.entry import reason_of
from zerograph.runtime.offload.blocks import UNIT, Block, StatePlace
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.fetches import FetchedRun
from zerograph.runtime.offload.host import Transfer
from zerograph.runtime.offload.locations import COPY, GRADIENT, PARAMETER
from zerograph.runtime.offload.nvme import Priority, Ticket
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.timings import Purpose, TimedUpdate


class Stored(NamedTuple):
    """A part whose states are on NVMe, and the names of these."""

    part: Part
    slots: tuple[str, ...]


class _Slotted(NamedTuple):
    """A state in a slot: where it comes from, None where that changes, and its place there in bytes."""

    extent: Extent | None
    dtype: torch.dtype
    at: int


class _StoredPiece(NamedTuple):
    """Elements of a member that one chunk has."""

    member: int
    first: int
    size: int


@dataclass(slots=True)
class _PartWork:
    """The tensors of one part in one chunk."""

    part: int
    tensors: _core.TensorSet
    pieces: list[_StoredPiece]


@dataclass(slots=True)
class _StoredChunk:
    block: Block
    slot: Tensor
    begin: int
    end: int
    kinds: list[_Slotted]
    parameter: _Slotted | None
    gradient: _Slotted | None
    works: list[_PartWork]
    under_way: list[Ticket] = field(default_factory=list)
    copies: list[Transfer] = field(default_factory=list)
    ahead: Sequence[_Slotted] = ()  # that its slot has, or will have
    was_kept: bool = False  # the last update had parameters of it in memory

    def view(self, kind: _Slotted) -> Tensor:
        return self.slot[kind.at : kind.at + (self.end - self.begin) * kind.dtype.itemsize]

    def part(self, kind: _Slotted, begin: int, end: int) -> Tensor:
        """The bytes of elements from ``begin`` to ``end`` of the block."""
        size = kind.dtype.itemsize
        return self.view(kind)[(begin - self.begin) * size : (end - self.begin) * size]

    def common(self, run: FetchedRun) -> tuple[int, int]:
        """From where to where elements of the block are in ``run`` too; nothing where the end comes first."""
        return max(run.begin, self.begin), min(run.begin + len(run.memory), self.end)


class Stream:
    """The update of some parts, again and again."""

    def __init__(self, owner: Optimizer, store: ShardStore, stored: Sequence[Stored]) -> None:
        self._owner = weakref.ref(owner)
        self._store, self._arena, self.parts = store, store.room.arena, [s.part for s in stored]
        # Of this update, where gradients are on NVMe, and by place of a parameter what follows it elsewhere.
        self._gradients: dict[Block, tuple[Extent, int] | None] = {}
        self._follow: dict[StatePlace, Tensor] = {}
        self._late: dict[StatePlace, Tensor] = {}  # second copies of 16-bit parameters, which follow their masters
        # Of members in several chunks: their counts, and copies that all chunks but the last increment.
        self._counts: list[tuple[Tensor, Tensor]] = []
        self._chunks: list[_StoredChunk] = []
        # Their versions tell of writes through torch, as kernels' are not: when reading ahead began, and when the
        # update was asked for.
        members = [member for part in self.parts for member in part.members]
        self._watched = [tensor for part in self.parts for tensor in part.watched]
        self._watched += [tensor for member in members for tensor in (member.target, *member.states)]
        self._ahead_of = self._as_of = self._versions()
        self._timed: TimedUpdate | None = None
        places = {_place(m) for part in self.parts for m in part.members}
        self._mastered = {_place(m) for part in self.parts if part.mastered for m in part.members}
        blocks = dict.fromkeys(_place(m).block for part in self.parts for m in part.members)
        begun = ((StatePlace(block, begin), name) for block in blocks for name, begin in block.begins.items())
        self._names = {p: name for p, name in begun if p in places and p.block.ends[name] > p.begin}
        for block in blocks:
            self._cut(owner, store, block, stored)

    def _cut(self, owner: Optimizer, store: ShardStore, block: Block, stored: Sequence[Stored]) -> None:
        ring, kinds, place = store.slots.ring, dict[tuple[str, torch.dtype], _Slotted](), 0
        wanted = dict.fromkeys(
            kind
            for part, slots in stored
            for member in part.members
            if _place(member).block is block
            for kind in _stored(member, part, slots)
        )
        if store.gradients.on_nvme.is_used or store.gradients.stay(block):
            wanted[GRADIENT, block.dtype] = None
        most = ring[0].nbytes // max(1, sum(dtype.itemsize for _, dtype in wanted)) // UNIT * UNIT
        for name, dtype in wanted:
            extent = store.extent(owner, block, name, dtype) if name != GRADIENT else None
            kinds[name, dtype] = _Slotted(extent, dtype, place)
            place += most * dtype.itemsize
        for begin in range(0, block.elements, most):
            end = min(begin + most, block.elements)
            slot = ring[len(self._chunks) % len(ring)]
            works = list(self._works(stored, block, begin, end, slot, kinds))
            if works:
                on_disk = [kind for kind in kinds.values() if kind.extent is not None]
                own, gradient = (kinds.get((name, block.dtype)) for name in (PARAMETER, GRADIENT))
                self._chunks.append(_StoredChunk(block, slot, begin, end, on_disk, own, gradient, works))

    def _works(
        self,
        stored: Sequence[Stored],
        block: Block,
        begin: int,
        end: int,
        slot: Tensor,
        kinds: Mapping[tuple[str, torch.dtype], _Slotted],
    ) -> Iterator[_PartWork]:
        """The work on each part for elements from ``begin`` to ``end`` of ``block``."""
        for index, (part, slots) in enumerate(stored):
            pieces = list(_pieces(part.members, block, begin, end))
            if pieces:
                members = [self._there(part, slots, piece, begin, slot, kinds) for piece in pieces]
                yield _PartWork(index, tensor_set(members, part.mastered), pieces)

    def _there(
        self,
        part: Part,
        slots: Sequence[str],
        piece: _StoredPiece,
        begin: int,
        slot: Tensor,
        kinds: Mapping[tuple[str, torch.dtype], _Slotted],
    ) -> Member:
        """A piece of a member as a parameter of its own. All of it that is on NVMe lies in ``slot``, whose first
        element is ``begin`` of the block."""
        member, here = part.members[piece.member], dict[str, Tensor]()
        for name, dtype in _stored(member, part, slots):
            first = kinds[name, dtype].at + (_place(member).begin + piece.first - begin) * dtype.itemsize
            here[name] = slot[first : first + piece.size * dtype.itemsize].view(dtype)
        elements = slice(piece.first, piece.first + piece.size)
        local = here[PARAMETER] if PARAMETER in here else flat(member.local)[elements]
        copy = here.get(COPY) if member.copy is None else flat(member.copy)[elements]
        states, step = [here[name] for name in slots], self._count(member, piece)
        return Member(member.index, local, here.get("master", local), states, step, member.fresh, copy=copy)

    def _count(self, member: Member, piece: _StoredPiece) -> Tensor | None:
        """Where the kernel counts the updates of a piece: once for each, so that every piece needs a count."""
        if member.step is None or piece.first + piece.size == member.local.numel():
            return member.step
        copy = member.step.clone()
        self._counts.append((copy, member.step))
        return copy

    def read_ahead(self) -> None:
        """Begin to read what the next update needs first, gradients aside.

        Their slots belong to it until :meth:`run` or :meth:`forget`. Until then the store writes to none of it past its
        mappings.
        """
        self._ahead_of = self._versions()
        for chunk in self._chunks[: SLOTS - 1]:
            chunk.ahead = [kind for kind in chunk.kinds if not (chunk.was_kept and kind is chunk.parameter)]
            for kind in chunk.ahead:
                self._transfer(self._arena.read, chunk, kind, Priority.later)

    def asked(self) -> None:
        """The update is asked for: it sees what has been written by now."""
        self._as_of = self._versions()

    def updated(self, tensors: Sequence[Tensor]) -> None:
        """An update that wrote before anything was read ahead counts in the versions of ``tensors`` only now."""
        counted = set(map(id, tensors))
        self._ahead_of = [
            seen + (id(tensor) in counted) for seen, tensor in zip(self._ahead_of, self._watched, strict=True)
        ]

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._watched]

    def forget(self) -> None:
        """Have nothing read ahead, and nothing under way."""
        for chunk in self._chunks:
            for ticket in chunk.under_way:
                with contextlib.suppress(StorageError):  # the first error is on its way to the caller
                    self._arena.wait(ticket)
            for copy in chunk.copies:
                with contextlib.suppress(Exception):
                    copy.arrive()
            chunk.under_way, chunk.copies, chunk.ahead = [], [], ()
        self._timed = None

    def run(
        self, rules: Sequence[_core.Rule], grads: Sequence[Gradients], factor: float, kept: list[FetchedRun]
    ) -> None:
        """Update everything that has a gradient, and return when all is written.

        Args:
            rules, grads: of each part.
            factor: what gradients are multiplied by.
            kept: of the parameters, what is in memory; nothing when it returns.

        Raises:
            StorageError: a transfer failed. Some chunks have been updated and others not, unless it was one ahead.
        """
        self._store.slots.take(self)
        try:
            self._confirm()
        except BaseException:
            self.forget()
            raise
        for copy, count in self._counts:
            copy.copy_(count)
        extent_of = self._store.gradients.on_nvme.extent_of
        self._gradients = {chunk.block: extent_of(chunk.block) for chunk in self._chunks if chunk.gradient}
        copied = {place: self._store.copies.begin_to_follow(name) for place, name in self._names.items()}
        self._follow = {place: copy for place, copy in copied.items() if copy is not None}
        late = {p: self._store.copies.late(self._names[p]) for p in self._mastered & self._names.keys()}
        self._late = {place: copy for place, copy in late.items() if copy is not None}
        try:
            through_slots(
                self._chunks,
                lambda chunk: self._read(chunk, grads, kept),
                self._wait,
                lambda chunk: _core.update(self._calls(chunk, rules, grads), factor),
                self._write,
                lambda chunk, *times: self._store.timings.add("cpu_update", self._purpose(chunk), *times),
            )
            self._store.slots.has_run(self)
            self._update.ended, self._timed = True, None
        except BaseException as error:
            owner = self._owner()
            assert owner is not None  # its step runs
            self._store.half_done[owner] = reason_of(error)
            self.forget()
            raise
        finally:
            kept.clear()

    def _confirm(self) -> None:
        """Keep of what was read ahead only what nobody has touched since: a checkpoint that was loaded, the user.

        Files and pages tell of whoever wrote past torch, but the system may let go of pages, and files are written to
        by others too until a backward ends.
        """
        is_new = all(ahead >= asked for ahead, asked in zip(self._ahead_of, self._as_of, strict=True))
        for chunk in self._chunks[: SLOTS - 1]:
            if chunk.ahead:
                self._wait(chunk)
                # Pages that were touched may be gone again, but then the files are newer.
                touched = any(self._is_touched(kind, chunk.begin, chunk.end) for kind in chunk.ahead)
                chunk.ahead = chunk.ahead if is_new and self._store.slots.is_as_left and not touched else ()

    def _is_touched(self, kind: _Slotted, begin: int, end: int) -> bool:
        extent, size = kind.extent, kind.dtype.itemsize
        return extent is not None and self._arena.is_touched(extent, begin * size, (end - begin) * size)

    def _calls(
        self, chunk: _StoredChunk, rules: Sequence[_core.Rule], grads: Sequence[Gradients]
    ) -> list[tuple[_core.Rule, _core.TensorSet, list[int], _core.DType, list[bool]]]:
        calls = []
        for work in chunk.works:
            part, addresses = self.parts[work.part], grads[work.part].addresses
            at = [self._gradient(chunk, part, piece, addresses[piece.member]) for piece in work.pieces]
            fresh = [part.fresh[p.member] for p in work.pieces] if part.fresh else []
            calls.append((rules[work.part], work.tensors, at, TAGS[part.grad_dtype], fresh))
        return calls

    def _gradient(self, chunk: _StoredChunk, part: Part, piece: _StoredPiece, address: int) -> int:
        """Where the kernel finds the gradient of a piece, whose parameter's is at ``address``; 0 where it has none."""
        if not address:
            return 0
        size, spilled = part.grad_dtype.itemsize, self._gradients.get(chunk.block)
        begin = _place(part.members[piece.member]).begin
        on_nvme = spilled is not None and address == spilled[1] + begin * size
        if chunk.gradient is not None and (on_nvme or self._comes(chunk, part)):
            return chunk.slot.data_ptr() + chunk.gradient.at + (begin + piece.first - chunk.begin) * size
        return address + piece.first * size  # the user's own, or one that was kept from an earlier backward

    def _read(self, chunk: _StoredChunk, grads: Sequence[Gradients], kept: Sequence[FetchedRun]) -> None:
        own, ahead, chunk.ahead = chunk.parameter, chunk.ahead, ()
        for kind in chunk.kinds:
            if kind not in ahead and kind is not own:
                self._transfer(self._arena.read, chunk, kind)
        spilled = self._gradients.get(chunk.block)
        if chunk.gradient is not None and spilled is not None:
            self._transfer(self._arena.read, chunk, chunk.gradient._replace(extent=spilled[0]))
        self._bring_gradients(chunk, grads)
        if own is None:
            return
        runs = [run for run in kept if self._has_own(run, chunk, own)]
        chunk.was_kept = bool(runs)
        if own not in ahead:
            for part in self._copy_kept(chunk, own, runs):
                self._transfer(self._arena.read, chunk, own, part=part)

    def _has_own(self, run: FetchedRun, chunk: _StoredChunk, own: _Slotted) -> bool:
        """Whether ``run`` has parameters of ``chunk`` as they are: somebody may have written to them since."""
        begin, end = chunk.common(run)
        return run.block is chunk.block and begin < end and not self._is_touched(own, begin, end)

    def _copy_kept(self, chunk: _StoredChunk, own: _Slotted, runs: Sequence[FetchedRun]) -> Iterator[tuple[int, int]]:
        """Copy the parameters of ``chunk`` that are in memory to its slot; yields from where to where others lie."""
        lacks = chunk.begin
        for run in runs:
            begin, end = chunk.common(run)
            self._arena.wait(run.read)
            chunk.part(own, begin, end).view(own.dtype).copy_(run.memory[begin - run.begin : end - run.begin])
            if lacks < begin:
                yield lacks, begin
            lacks = end
        if lacks < chunk.end:
            yield lacks, chunk.end

    def _bring_gradients(self, chunk: _StoredChunk, grads: Sequence[Gradients]) -> None:
        for work in chunk.works:
            part, own = self.parts[work.part], grads[work.part].tensors
            if chunk.gradient is None or not self._comes(chunk, part):
                continue
            for piece in work.pieces:
                grad = own[piece.member]
                if grad is not None:
                    begin = _place(part.members[piece.member]).begin
                    self._copy(chunk, chunk.gradient, begin, flat(grad), piece.first, piece.size, here=True)

    def _write(self, chunk: _StoredChunk) -> None:
        for kind in chunk.kinds:
            self._transfer(self._arena.write, chunk, kind)
        self._bring_copies(chunk)

    def _comes(self, chunk: _StoredChunk, part: Part) -> bool:
        """Whether gradients of ``part`` come from the device to the slot of ``chunk``."""
        # model.to(dtype) has brought those of another dtype here.
        return self._store.gradients.stay(chunk.block) and part.grad_dtype == chunk.block.dtype

    def _bring_copies(self, chunk: _StoredChunk) -> None:
        """Begin to copy what was updated to where it is gathered from, and copy what is gathered later."""
        if chunk.parameter is None:
            return
        for place, copy, first, size in _within(chunk, self._follow):
            self._copy(chunk, chunk.parameter, place.begin, copy, first, size, here=False)
        updated = chunk.view(chunk.parameter).view(chunk.parameter.dtype)
        for place, copy, first, size in _within(chunk, self._late):
            at = place.begin + first - chunk.begin
            copy[first : first + size].copy_(updated[at : at + size])

    def _copy(
        self, chunk: _StoredChunk, kind: _Slotted, begin: int, flat: Tensor, first: int, size: int, *, here: bool
    ) -> None:
        """Begin to copy ``size`` elements from the ``first`` one of a tensor, whose parameter has its place at
        ``begin``, to the slot of ``chunk``, or from there."""
        at = begin + first - chunk.begin
        pair = flat[first : first + size], chunk.view(kind).view(kind.dtype)[at : at + size]
        source, target = pair if here else pair[::-1]
        # In the words of the update's instructions: gradients that stayed on the device, and what is gathered there.
        way: Way = "d2h" if here else "h2d"
        purpose = chunk.block.purpose("gradient" if here else "parameters", self._update)
        chunk.copies.append(self._store.locations.hosted.memory.start(way, [(source, target)], purpose=purpose))

    @property
    def _update(self) -> TimedUpdate:
        """The update that is under way, or is read ahead for."""
        if self._timed is None:
            self._timed = self._store.timings.update()
        return self._timed

    def _purpose(self, chunk: _StoredChunk) -> Purpose:
        return chunk.block.purpose("states", self._update)

    def _transfer(
        self,
        transfer: Callable[..., Ticket],
        chunk: _StoredChunk,
        kind: _Slotted,
        priority: Priority = Priority.now,
        part: tuple[int, int] | None = None,
    ) -> None:
        """Begin to read or write one kind of ``chunk``, or elements of it from where to where."""
        begin, end = part or (chunk.begin, chunk.end)
        offset, view = begin * kind.dtype.itemsize, chunk.part(kind, begin, end)
        chunk.under_way.append(transfer(kind.extent, view, priority, offset=offset, purpose=self._purpose(chunk)))

    def _wait(self, chunk: _StoredChunk) -> None:
        while chunk.under_way:
            self._arena.wait(chunk.under_way[-1])
            chunk.under_way.pop()
        while chunk.copies:
            chunk.copies.pop().arrive()


def _within(chunk: _StoredChunk, copies: Mapping[StatePlace, Tensor]) -> Iterator[tuple[StatePlace, Tensor, int, int]]:
    """The ``copies`` of which ``chunk`` has elements: the first of these, and how many."""
    for place, copy in copies.items():
        first = max(chunk.begin, place.begin) - place.begin
        size = min(chunk.end - place.begin, len(copy)) - first
        if place.block is chunk.block and size > 0:
            yield place, copy, first, size


def _place(member: Member) -> StatePlace:
    assert member.place is not None  # of members of stored parts
    return member.place


def _pieces(members: Sequence[Member], block: Block, begin: int, end: int) -> Iterator[_StoredPiece]:
    """The pieces of ``members`` between two elements of ``block``."""
    for index, member in enumerate(members):
        place = _place(member)
        if place.block is block:
            first = max(begin, place.begin)
            size = min(end, place.begin + member.local.numel()) - first
            if size > 0:
                yield _StoredPiece(index, first - place.begin, size)


def _stored(member: Member, part: Part, slots: Sequence[str]) -> Iterator[tuple[str, torch.dtype]]:
    """The tensors of a member on NVMe, by name and dtype, which each update writes there."""
    yield from ((slot, state.dtype) for slot, state in zip(slots, member.states, strict=True))
    if part.mastered:
        yield "master", member.target.dtype
    yield from member.streamed
