"""The update on the device of parameters whose states are on the host: copied there, updated and copied back, in chunks
through a ring of slots.

While one chunk is updated, the next ones come and the one before goes back. On an accelerator kernels are those of what
lives there, and the host waits for nothing before the end. Where the device is simulated they are those of the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

import zerograph._core as _core
from zerograph.core import slots
from zerograph.core.slots import SLOTS
from zerograph.optim.algorithm import Group
from zerograph.optim.factor import Factor
from zerograph.optim.parts import Member, Part, address, flat, tensor_set
from zerograph.optim.ring import Updating, through_slots
from zerograph.optim.tensors import TAGS, Gradients
from zerograph.runtime.comm.entry import reason_of
from zerograph.runtime.offload.host import Transfer
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.timings import Purpose, TimedUpdate

_ALIGNED = 256
"""Bytes: what is in a slot begins at multiples, where vector loads are aligned."""


class _CopiedPiece(NamedTuple):
    """Elements of a member that one chunk has, and the bytes at which they begin in its slot, by what they are: what is
    updated, each state, the gradient, and the parameter that follows its master."""

    member: int
    first: int
    size: int
    at: tuple[int, ...]


@dataclass(slots=True)
class _CopiedChunk:
    part: int
    pieces: list[_CopiedPiece]
    slot: Tensor
    under_way: list[Transfer] = field(default_factory=list)
    awaited: list[Transfer] = field(default_factory=list)
    updated: Part | None = None  # its pieces in the slot, which the host's kernels know by addresses

    def wait(self) -> None:
        """Let the device wait for what is copied to the slot, or from it."""
        self.awaited, self.under_way = self.under_way, []
        for transfer in self.awaited:
            transfer.wait()

    def arrive(self) -> None:
        """Wait for what is copied to the slot, or from it, and for what the device waits for."""
        while transfers := self.under_way or self.awaited:
            transfers.pop().arrive()


class _Told:
    """An :class:`~zerograph.optim.ring.Updating` that the device was told, in the order of its streams."""

    ended = 0

    def wait(self) -> bool:
        """Nothing has to."""
        return False


UpdateThere = Callable[[Group, Part, Gradients, Factor], None]
"""Updates a part on the device that it lies on."""


class ThroughDevice:
    """One update of some parts."""

    def __init__(
        self,
        owner: Optimizer,
        store: ShardStore,
        parts: Sequence[tuple[Part, Group, _core.Rule, Gradients]],
        factor: Factor,
        update_there: UpdateThere,
    ) -> None:
        """
        Args:
            parts: each with its group, the rule of that, and its gradients.
            factor: of the gradients.
        """
        self._owner, self._store, self._parts = owner, store, parts
        self._factor, self._update_there = factor, update_there
        self._memory = store.locations.hosted.memory
        self._is_simulated = self._memory.device.type == "cpu"
        self._timed = TimedUpdate(0)
        self._follow: list[list[Tensor | None]] = []  # of each part's members, the copy that is gathered

    def run(self) -> None:
        """Update everything that has a gradient, and return when all is back on the host."""
        chunks: list[_CopiedChunk] = []
        self._timed = self._store.timings.update()
        self._cut_slots(chunks)
        self._follow = [
            [
                self._store.copies.begin_to_follow(m.through_device) if a else None
                for m, a in zip(part.members, grads.addresses, strict=True)
            ]
            for part, _, _, grads in self._parts
        ]
        try:
            through_slots(
                chunks,
                self._copy_up,
                _CopiedChunk.arrive if self._is_simulated else _CopiedChunk.wait,
                self._update,
                self._copy_down,
            )
            for chunk in chunks[-SLOTS:]:  # those before went back earlier in the same stream
                chunk.arrive()
            self._count()
            self._timed.ended = True
        except BaseException as error:
            self._store.half_done[self._owner] = reason_of(error)
            for chunk in chunks:
                while chunk.under_way or chunk.awaited:
                    with contextlib.suppress(Exception):  # the first error is on its way to the caller
                        chunk.arrive()
            raise

    def _cut_slots(self, chunks: list[_CopiedChunk]) -> None:
        """Slots are made for each update, so that a forward and a backward have their memory."""
        cuts = [(index, pieces) for index, (part, *_) in enumerate(self._parts) for pieces in _cut(part, slots.SLOT)]
        size = max((_end(self._parts[index][0], pieces[-1]) for index, pieces in cuts), default=0)
        make = self._memory.room if self._is_simulated else self._memory.above
        ring = [make(size) for _ in range(min(SLOTS, len(cuts)))]
        chunks += [_CopiedChunk(index, pieces, ring[i % SLOTS]) for i, (index, pieces) in enumerate(cuts)]

    def _update(self, chunk: _CopiedChunk) -> Updating:
        part, group, rule, grads = self._parts[chunk.part]
        pieces = [p for p in chunk.pieces if grads.tensors[p.member] is not None]
        if not pieces:
            return _Told()
        members = [_there(part.members[p.member], chunk.slot, p, part.mastered) for p in pieces]
        own = [_in_slot(chunk.slot, p, p.at[_gradient(part)], part.grad_dtype) for p in pieces]
        fresh = [part.fresh[p.member] for p in pieces] if part.fresh else []
        there = Part(members, [m.index for m in members], [], part.grad_dtype, fresh=fresh)
        if self._is_simulated:
            chunk.updated = there
            calls = [(rule, tensor_set(members, part.mastered), list(map(address, own)), TAGS[part.grad_dtype], fresh)]
            return _core.update(calls, self._factor.number)
        self._update_there(group, there, Gradients([*own], [1] * len(own), True), self._factor)
        return _Told()

    def _count(self) -> None:
        """Of the count of its updates, which every rank has, also those that have no rows of a parameter."""
        for part, _, _, grads in self._parts:
            for member, given in zip(part.members, grads.addresses, strict=True):
                if given and member.step is not None:
                    member.step += 1

    def _purpose(self, member: Member) -> Purpose:
        return Purpose("states", member.through_device, self._timed)

    def _copy_up(self, chunk: _CopiedChunk) -> None:
        part, _, _, grads = self._parts[chunk.part]
        for piece in chunk.pieces:
            member, grad = part.members[piece.member], grads.tensors[piece.member]
            for at, tensor in zip(piece.at, (member.target, *member.states, grad), strict=False):
                if grad is not None and tensor is not None:
                    there, here = _pair(tensor, chunk.slot, piece, at)
                    own = self._purpose(member)
                    chunk.under_way.append(self._memory.start("h2d", [(there, here)], purpose=own))

    def _copy_down(self, chunk: _CopiedChunk) -> None:
        part, _, _, grads = self._parts[chunk.part]
        for piece in chunk.pieces:
            member, copy = part.members[piece.member], self._follow[chunk.part][piece.member]
            if grads.tensors[piece.member] is None:
                continue
            pairs = [
                _pair(tensor, chunk.slot, piece, at)
                for at, tensor in zip(piece.at, (member.target, *member.states), strict=False)
            ]
            if part.mastered:
                pairs.append(_pair(member.local, chunk.slot, piece, piece.at[-1]))
            if copy is not None:  # which is gathered: of the parameter, the last of a master's and else the first
                pairs.append((copy[piece.first : piece.first + piece.size], pairs[-1 if part.mastered else 0][1]))
            back = [(here, there) for there, here in pairs]
            chunk.under_way.append(self._memory.start("d2h", back, purpose=self._purpose(member)))


def _in_slot(slot: Tensor, piece: _CopiedPiece, at: int, dtype: torch.dtype) -> Tensor:
    return slot[at : at + piece.size * dtype.itemsize].view(dtype)


def _there(member: Member, slot: Tensor, piece: _CopiedPiece, mastered: bool) -> Member:
    """A piece of ``member`` as a parameter of its own, which lies in ``slot``."""
    target = _in_slot(slot, piece, piece.at[0], member.target.dtype)
    states = [_in_slot(slot, piece, at, s.dtype) for at, s in zip(piece.at[1:], member.states, strict=False)]
    local = _in_slot(slot, piece, piece.at[-1], member.local.dtype) if mastered else target
    # The count is the host's: kernels add to one that is brought along, for each piece.
    step = None if member.step is None else torch.full((), float(member.step), device=slot.device)
    return Member(member.index, local, target, states, step, member.fresh)


def _pair(tensor: Tensor, slot: Tensor, piece: _CopiedPiece, at: int) -> tuple[Tensor, Tensor]:
    """The part of ``tensor`` in ``piece``: where it lives, and in its slot."""
    there = flat(tensor)[piece.first : piece.first + piece.size]
    return there, _in_slot(slot, piece, at, there.dtype)


def _sizes(part: Part) -> list[int]:
    """Bytes of an element of all that a slot has."""
    first = part.members[0]
    follows = [first.local.itemsize] if part.mastered else []
    return [first.target.itemsize, *(s.itemsize for s in first.states), part.grad_dtype.itemsize, *follows]


def _gradient(part: Part) -> int:
    """The place of the gradient among these."""
    return 1 + len(part.members[0].states)


def _end(part: Part, piece: _CopiedPiece) -> int:
    return piece.at[-1] + piece.size * _sizes(part)[-1]


def _cut(part: Part, most: int) -> Iterator[list[_CopiedPiece]]:
    """The elements of ``part``, as many at a time as a slot of ``most`` bytes holds."""
    sizes, pieces, end = _sizes(part), list[_CopiedPiece](), 0
    for index, member in enumerate(part.members):
        first, count = 0, member.local.numel()
        while first < count:
            room = (most - end) // _ALIGNED * _ALIGNED - len(sizes) * _ALIGNED
            size = min(count - first, max(room // sum(sizes), 0 if pieces else 1))
            if size:
                at = []
                for each in sizes:
                    at.append(end)
                    end += -(-size * each // _ALIGNED) * _ALIGNED
                pieces.append(_CopiedPiece(index, first, size, tuple(at)))
                first += size
            if first < count:
                yield pieces
                pieces, end = [], 0
    if pieces:
        yield pieces
