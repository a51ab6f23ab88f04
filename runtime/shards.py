"""Where what belongs to the parameters of a backend lives: nobody else knows of tiers.

What leaves the device lies in extents of one arena. The shards of a bucket lie there one behind another, so that an
update moves many small ones in one transfer. Each kind of state (a moment, a master copy) has an extent of its own, in
which a parameter has the same place, counted in elements. Whoever does not know of extents, a checkpoint or a stock
optimizer, sees ordinary tensors: mappings of them (:func:`~zerograph.runtime.store.mapped_tensor`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerograph.core.errors import StorageError
from zerograph.core.plan import Bucket, Plan
from zerograph.core.units import format_bytes
from zerograph.runtime.extents import ALIGNMENT, Extent
from zerograph.runtime.nvme import Arena, huge_tensor
from zerograph.runtime.store import mapped_tensor
from zerograph.runtime.torch_private import local_tensor

log = logging.getLogger(__name__)

UNIT = ALIGNMENT // 2
"""Elements: transfers of extents begin and end at multiples, whole blocks of the disk in any dtype of two bytes or
more."""

_APART = 64
"""Elements: each shard begins at a multiple, where vector loads are aligned."""


@dataclass(eq=False, slots=True)
class Block:
    """The trained shards of one bucket whose states are on NVMe.

    Attributes:
        name: of the bucket.
        begins: by parameter, its first element.
        elements: of all, padded to whole units.
    """

    name: str
    begins: dict[str, int]
    elements: int


class Place(NamedTuple):
    """Where the states of a parameter are."""

    block: Block
    begin: int


@dataclass(slots=True)
class _Kind:
    """One state of all parameters of a bucket that one optimizer keeps; ``given`` are the places it was asked for."""

    extent: Extent
    given: set[int] = field(default_factory=set)


class ShardStore:
    """The homes of one backend's parameters; they are given once, by the first plan that has some for a parameter.

    Attributes:
        arena: with everything that is on NVMe; None while nothing is.
    """

    def __init__(self, params: Mapping[str, Tensor], open_arena: Callable[[int], Arena]) -> None:
        """``params`` are the outward parameters by name, now and later; ``open_arena`` makes room for so many bytes."""
        self._params, self._open = params, open_arena
        self._blocks: dict[str, Block] = {}  # by parameter
        # By bucket, name and dtype. Not by parameter and name alone: two optimizers may hold one parameter.
        self._kinds: weakref.WeakKeyDictionary[Optimizer, dict[tuple[Block, str, torch.dtype], _Kind]]
        self._kinds = weakref.WeakKeyDictionary()
        self._extents: set[Extent] = set()
        self._ring: list[Tensor] = []
        self.arena: Arena | None = None

    def settle(self, plan: Plan, moments: int) -> None:
        """Give homes to the parameters of ``plan`` that have none yet.

        Args:
            moments: tensors of float32 that an optimizer keeps of each parameter, for which room is reserved.

        Raises:
            StorageError: there is no room.
        """
        away = [b for b in plan.buckets if b.homes.optimizer == "nvme"]
        new = [block for bucket in away if (block := self._block(bucket)).begins]
        if not new:
            return
        if self.arena is None:
            # For all of the model: other frames read the rest of it.
            sizes = [local_tensor(p).numel() for p in self._params.values() if p.requires_grad]
            padded = sum(-(-size // UNIT) * UNIT for size in sizes)
            self.arena = self._open(padded * moments * torch.float32.itemsize)
        for block in new:
            self._blocks.update(dict.fromkeys(block.begins, block))
        log.info("optimizer states of %d buckets on NVMe (%s)", len(new), format_bytes(self.arena.size))

    def _block(self, bucket: Bucket) -> Block:
        begins, end = {}, 0
        for param in bucket.params:
            if param.trainable and param.sharded and param.name not in self._blocks:
                begins[param.name] = end
                end += -(-local_tensor(self._params[param.name]).numel() // _APART) * _APART
        return Block(bucket.name, begins, -(-end // UNIT) * UNIT)

    def places(self) -> dict[int, Place]:
        """Where the states of parameters are that have left the device, by ``id`` of the parameter."""
        blocks = self._blocks
        return {
            id(p): Place(blocks[name], blocks[name].begins[name]) for name, p in self._params.items() if name in blocks
        }

    def state(self, owner: Optimizer, place: Place, name: str, dtype: torch.dtype, like: Tensor, fill: float) -> Tensor:
        """The state ``name`` that ``owner`` keeps of the parameter at ``place``, in the shape of ``like``.

        It is a mapping of its extent. Where there was none, ``fill`` is everywhere in it.

        Raises:
            StorageError: there is no room for states of its bucket.
        """
        assert self.arena is not None
        kinds = self._kinds.setdefault(owner, {})
        key = (place.block, name, dtype)
        if key not in kinds:
            kinds[key] = _Kind(self._made(place.block, name, dtype, fill))
        kind = kinds[key]
        flat = mapped_tensor(self.arena, kind.extent, dtype, (like.numel(),), place.begin * dtype.itemsize)
        if place.begin in kind.given:  # the optimizer's user has dropped it
            flat.fill_(fill)
        kind.given.add(place.begin)
        return flat.as_strided(like.shape, like.stride())

    def is_home(self, owner: Optimizer, place: Place, name: str, value: Tensor) -> bool:
        """Whether ``value`` is the tensor that :meth:`state` gave."""
        kind = self._kinds.get(owner, {}).get((place.block, name, value.dtype))
        if kind is None or self.arena is None or not self.arena.is_mapped(kind.extent):
            return not value.numel()
        return value.data_ptr() == self.arena.map(kind.extent).address + place.begin * value.dtype.itemsize

    def extent(self, owner: Optimizer, block: Block, name: str, dtype: torch.dtype) -> Extent:
        """Where :meth:`state` has put the states of a bucket."""
        return self._kinds[owner][block, name, dtype].extent

    def _made(self, block: Block, name: str, dtype: torch.dtype, fill: float) -> Extent:
        assert self.arena is not None
        size = block.elements * dtype.itemsize
        if self.arena.free_bytes < size:
            self._reclaim()
        try:
            extent = self.arena.allocate(size)
        except StorageError as error:
            raise StorageError(
                f"{str(error).partition(chr(10))[0]}; they are for {name} of bucket {block.name}",
                "give the backend more room: zerograph.backend(nvme='...GiB')",
            ) from None
        # Written and not mapped: pages that nobody reads would fill the memory.
        chunk = self.ring[0].view(dtype)
        chunk.fill_(fill)
        for begin in range(0, block.elements, len(chunk)):
            part = chunk[: min(len(chunk), block.elements - begin)]
            self.arena.wait(self.arena.write(extent, part, offset=begin * dtype.itemsize))
        self._extents.add(extent)
        return extent

    def _reclaim(self) -> None:
        """Free what belonged to optimizers that are gone."""
        assert self.arena is not None
        held = {kind.extent for kinds in self._kinds.values() for kind in kinds.values()}
        for extent in self._extents - held:
            if not self.arena.is_mapped(extent):
                self.arena.free(extent)
                self._extents.remove(extent)

    @property
    def ring(self) -> list[Tensor]:
        """The slots that states pass through, made when they are first needed."""
        if not self._ring:
            largest = max((block.elements for block in self._blocks.values()), default=0)
            size = min(SLOT, MOST_KINDS * largest * torch.float32.itemsize)
            self._ring = [huge_tensor(size) for _ in range(SLOTS)]
            assert self.arena is not None
            for slot in self._ring:
                self.arena.register(slot)
        return self._ring

    def bytes(self) -> int:
        """On NVMe."""
        return sum(kind.extent.bytes for kinds in self._kinds.values() for kind in kinds.values())


SLOTS = 3
"""One being read, one in use, one being written."""

SLOT = 64 * 2**20
"""Bytes of one slot."""

MOST_KINDS = 4
"""That an update reads of each parameter at a time: master, and at most three moments."""
