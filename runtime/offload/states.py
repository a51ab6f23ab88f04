"""The states of optimizers on NVMe."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerograph.runtime.offload.blocks import Block, StatePlace
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.slots import Slots
from zerograph.runtime.offload.store import mapped_tensor


@dataclass(slots=True)
class _Kind:
    """One state of all parameters of a bucket that one optimizer keeps; ``given`` are the places it was asked for."""

    extent: Extent
    given: set[int] = field(default_factory=set)


class OffloadedStates:
    """What each optimizer keeps there, while it lives."""

    def __init__(self, room: ArenaRoom, slots: Slots) -> None:
        self._room, self._slots = room, slots
        # By bucket, name and dtype. Not by parameter and name alone: two optimizers may hold one parameter.
        self._kinds: weakref.WeakKeyDictionary[Optimizer, dict[tuple[Block, str, torch.dtype], _Kind]]
        self._kinds = weakref.WeakKeyDictionary()

    def of(
        self, owner: Optimizer, place: StatePlace, name: str, dtype: torch.dtype, like: Tensor, fill: float
    ) -> Tensor:
        """The state ``name`` that ``owner`` keeps of the parameter at ``place``, in the shape of ``like``.

        It is a mapping of its extent. Where there was none, ``fill`` is everywhere in it.

        Raises:
            StorageError: there is no room for states of its bucket.
        """
        kinds = self._kinds.setdefault(owner, {})
        key = (place.block, name, dtype)
        if key not in kinds:
            kinds[key] = _Kind(self._made(place.block, name, dtype, fill))
        kind = kinds[key]
        flat = mapped_tensor(self._room.arena, kind.extent, dtype, (like.numel(),), place.begin * dtype.itemsize)
        if place.begin in kind.given:  # the optimizer's user has dropped it
            flat.fill_(fill)
        kind.given.add(place.begin)
        return flat.as_strided(like.shape, like.stride())

    def holds(self, owner: Optimizer, place: StatePlace, name: str, value: Tensor) -> bool:
        """Whether ``value`` is the tensor that :meth:`of` gave."""
        kind, arena = self._kinds.get(owner, {}).get((place.block, name, value.dtype)), self._room.opened
        if kind is None or arena is None or not value.numel():
            return kind is not None  # what is empty lies nowhere
        address = arena.map(kind.extent).address if arena.is_mapped(kind.extent) else 0
        return value.data_ptr() == address + place.begin * value.dtype.itemsize

    def extent(self, owner: Optimizer, block: Block, name: str, dtype: torch.dtype) -> Extent:
        """Where :meth:`of` has put the states of a bucket."""
        return self._kinds[owner][block, name, dtype].extent

    def _made(self, block: Block, name: str, dtype: torch.dtype, fill: float) -> Extent:
        extent = self._room.extent(block, dtype, name)
        self._room.loose.add(extent)
        # Written and not mapped: pages that nobody reads would fill the memory.
        chunk, arena = self._slots.free().view(dtype), self._room.arena
        chunk.fill_(fill)
        for begin in range(0, block.elements, len(chunk)):
            part = chunk[: min(len(chunk), block.elements - begin)]
            arena.wait(arena.write(extent, part, offset=begin * dtype.itemsize))
        return extent

    def reclaim(self) -> None:
        """Free what belonged to optimizers that are gone."""
        self._slots.take()  # which keep states that are to be read ahead
        gc.collect()  # optimizers are in reference cycles
        for extent in self._room.loose - {*self._extents()}:
            if not self._room.arena.is_mapped(extent):
                self._room.arena.free(extent)
                self._room.loose.remove(extent)

    def _extents(self) -> Iterator[Extent]:
        return (kind.extent for kinds in self._kinds.values() for kind in kinds.values())

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(extent.bytes for extent in self._extents())
