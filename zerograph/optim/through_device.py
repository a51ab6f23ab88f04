"""The update on the device of parameters whose states are on the host: copied there, updated and copied back, in chunks
through a ring of slots.

While one chunk is updated, the next ones come and the one before goes back. On an accelerator kernels are those of what
lives there, and the host waits for nothing before the end. Where the device is simulated they are those of the host.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

import zerograph._core as _core
from zerograph.core.slots import SLOTS
from zerograph.optim.algorithm import Group
from zerograph.optim.factor import Factor
from zerograph.optim.parts import Member, Part, flat
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
    counts: list[Tensor]
    tensors: _core.TensorSet | None
    under_way: list[Transfer] = field(default_factory=list)
    awaited: list[Transfer] = field(default_factory=list)

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
    """The update of some parts, again and again."""

    def __init__(
        self, owner: Optimizer, store: ShardStore, parts: Sequence[Part], most: int, update_there: UpdateThere
    ) -> None:
        """``most`` are the bytes of a slot, at most."""
        self._owner, self._store, self.parts = weakref.ref(owner), store, list(parts)
        self._memory, self._update_there = store.locations.hosted.memory, update_there
        self._is_simulated = self._memory.device.type == "cpu"
        self._timed = TimedUpdate(0)
        self._cuts = [(index, pieces) for index, part in enumerate(self.parts) for pieces in _cut(part, most)]

    def run(
        self, groups: Sequence[Group], rules: Sequence[_core.Rule], grads: Sequence[Gradients], factor: Factor
    ) -> None:
        """Update everything that has a gradient, and return when all is back on the host.

        Args:
            groups, rules, grads: of each part.
            factor: of the gradients.
        """

        def update(chunk: _CopiedChunk) -> Updating:
            own = grads[chunk.part]
            if self._is_simulated:
                return _core.update([self._call(chunk, rules[chunk.part], own)], factor.number)
            self._update_pieces(chunk, groups[chunk.part], own, factor)
            return _Told()

        chunks: list[_CopiedChunk] = []
        self._timed = self._store.timings.update()
        self._cut_slots(chunks)
        follow = [
            [
                self._store.copies.begin_to_follow(m.through_device) if a else None
                for m, a in zip(p.members, g.addresses, strict=True)
            ]
            for p, g in zip(self.parts, grads, strict=True)
        ]
        try:
            through_slots(
                chunks,
                lambda chunk: self._copy_up(chunk, grads[chunk.part]),
                _CopiedChunk.arrive if self._is_simulated else _CopiedChunk.wait,
                update,
                lambda chunk: self._copy_down(chunk, grads[chunk.part], follow[chunk.part]),
            )
            for chunk in chunks[-SLOTS:]:  # those before went back earlier in the same stream
                chunk.arrive()
            self._timed.ended = True
        except BaseException as error:
            owner = self._owner()
            assert owner is not None  # its step runs
            self._store.half_done[owner] = reason_of(error)
            for chunk in chunks:
                while chunk.under_way or chunk.awaited:
                    with contextlib.suppress(Exception):  # the first error is on its way to the caller
                        chunk.arrive()
            raise

    def _cut_slots(self, chunks: list[_CopiedChunk]) -> None:
        """Slots are made for each update, so that a forward and a backward have their memory."""
        size = max((_end(self.parts[index], pieces[-1]) for index, pieces in self._cuts), default=0)
        make = self._memory.room if self._is_simulated else self._memory.above
        ring = [make(size) for _ in range(min(SLOTS, len(self._cuts)))]
        for i, (index, pieces) in enumerate(self._cuts):
            part, slot = self.parts[index], ring[i % SLOTS]
            counts = [count for p in pieces if (count := _count(part.members[p.member], p)) is not None]
            tensors = _tensors(part, pieces, slot.data_ptr(), counts) if self._is_simulated else None
            chunks.append(_CopiedChunk(index, pieces, slot, counts, tensors))

    def _update_pieces(self, chunk: _CopiedChunk, group: Group, grads: Gradients, factor: Factor) -> None:
        part = self.parts[chunk.part]
        pieces = [p for p in chunk.pieces if grads.tensors[p.member] is not None]
        if not pieces:
            return
        members = [_there(part.members[p.member], chunk.slot, p, part.mastered) for p in pieces]
        own = [_in_slot(chunk.slot, p, p.at[_gradient(part)], part.grad_dtype) for p in pieces]
        fresh = [part.fresh[p.member] for p in pieces] if part.fresh else []
        there = Part(members, [m.index for m in members], [], part.grad_dtype, fresh=fresh)
        self._update_there(group, there, Gradients([*own], [1] * len(own), True), factor)
        for p in pieces:
            count = part.members[p.member].step
            if count is not None and _is_last(part.members[p.member], p):
                count += 1

    def _call(
        self, chunk: _CopiedChunk, rule: _core.Rule, grads: Gradients
    ) -> tuple[_core.Rule, _core.TensorSet, list[int], _core.DType, list[bool]]:
        part, begin = self.parts[chunk.part], chunk.slot.data_ptr()
        assert chunk.tensors is not None  # where the device is simulated
        # Kernels leave alone what has its gradient at 0.
        at = [begin + p.at[_gradient(part)] if grads.addresses[p.member] else 0 for p in chunk.pieces]
        fresh = [part.fresh[p.member] for p in chunk.pieces] if part.fresh else []
        return rule, chunk.tensors, at, TAGS[part.grad_dtype], fresh

    def _purpose(self, member: Member) -> Purpose:
        return Purpose("states", member.through_device, self._timed)

    def _copy_up(self, chunk: _CopiedChunk, grads: Gradients) -> None:
        part = self.parts[chunk.part]
        for piece in chunk.pieces:
            member, grad = part.members[piece.member], grads.tensors[piece.member]
            for at, tensor in zip(piece.at, (member.target, *member.states, grad), strict=False):
                if grad is not None and tensor is not None:
                    there, here = _pair(tensor, chunk.slot, piece, at)
                    own = self._purpose(member)
                    chunk.under_way.append(self._memory.start("h2d", [(there, here)], purpose=own))

    def _copy_down(self, chunk: _CopiedChunk, grads: Gradients, follow: Sequence[Tensor | None]) -> None:
        part = self.parts[chunk.part]
        for piece in chunk.pieces:
            member, copy = part.members[piece.member], follow[piece.member]
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
    # The count is the host's: it is brought along, and added to when the last piece is updated.
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


def _count(member: Member, piece: _CopiedPiece) -> Tensor | None:
    """Where the kernel counts the updates of ``piece``: of several of one member the last has the member's count."""
    return member.step if _is_last(member, piece) or member.step is None else member.step.clone()


def _is_last(member: Member, piece: _CopiedPiece) -> bool:
    return piece.first + piece.size == member.local.numel()


def _tensors(part: Part, pieces: Sequence[_CopiedPiece], slot: int, counts: Sequence[Tensor]) -> _core.TensorSet:
    """The tensors of ``pieces`` in the slot at that address, as kernels see them."""
    first = part.members[0]
    return _core.TensorSet(
        [(slot + p.at[0], TAGS[first.target.dtype], p.size) for p in pieces],
        [[slot + p.at[1 + k] for p in pieces] for k in range(len(first.states))],
        TAGS[first.states[0].dtype] if first.states else _core.DType.float32,
        [slot + p.at[-1] for p in pieces] if part.mastered else [],
        TAGS[first.local.dtype],
        [count.data_ptr() for count in counts],
    )
