"""Where what belongs to the parameters of a backend lives: nobody else knows of tiers.

What leaves the device lies in extents of one arena. The shards of a bucket lie there one behind another, so that an
update moves many small ones in one transfer. Each kind of state (a moment, a master copy) has an extent of its own, in
which a parameter has the same place, counted in elements. Whoever does not know of extents, a checkpoint or a stock
optimizer, sees ordinary tensors: mappings of them (:func:`~zerograph.runtime.store.mapped_tensor`).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerograph.core.errors import StorageError
from zerograph.core.plan import Param, Plan
from zerograph.core.units import format_bytes
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.extents import ALIGNMENT, Extent
from zerograph.runtime.nvme import Arena, huge_tensor
from zerograph.runtime.store import mapped_tensor
from zerograph.runtime.torch_private import local_tensor, set_local

log = logging.getLogger(__name__)

UNIT = ALIGNMENT // 2
"""Elements: transfers of extents begin and end at multiples, whole blocks of the disk in any dtype of two bytes or
more."""

PARAMETER = "parameter"
"""What :meth:`ShardStore.extent` calls the parameters themselves, which no optimizer has for a state's name."""

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
class _Copy:
    """What is gathered in place of a parameter that left the device.

    Attributes:
        home: address of the parameter's mapping; where its memory is another one, it has come back.
        tensor: its values in the compute dtype, on the device.
        seen: the parameter's versions when it had these values; None once something has stepped on it that versions do
            not show.
    """

    home: int
    tensor: Tensor
    seen: tuple[int, int] | None


@dataclass(slots=True)
class _Kind:
    """One state of all parameters of a bucket that one optimizer keeps; ``given`` are the places it was asked for."""

    extent: Extent
    given: set[int] = field(default_factory=set)


class ShardStore:
    """The homes of one backend's parameters; they are given once, by the first plan that has some for a parameter.

    Attributes:
        arena: with everything that is on NVMe; None while nothing is.
        changes: how often homes were given.
    """

    def __init__(self, params: Mapping[str, Tensor], open_arena: Callable[[int], Arena]) -> None:
        """``params`` are the outward parameters by name, now and later; ``open_arena`` makes room for so many bytes."""
        self._params, self._open = params, open_arena
        self._blocks: dict[str, Block] = {}  # by parameter
        # By bucket, name and dtype. Not by parameter and name alone: two optimizers may hold one parameter.
        self._kinds: weakref.WeakKeyDictionary[Optimizer, dict[tuple[Block, str, torch.dtype], _Kind]]
        self._kinds = weakref.WeakKeyDictionary()
        self._extents: set[Extent] = set()
        self._masters: dict[Block, Extent] = {}
        self._copies: dict[str, _Copy] = {}  # by parameter
        self._ring: list[Tensor] = []
        self.arena: Arena | None = None
        self.changes = 0

    def settle(self, plan: Plan, moments: int, moved: Callable[[Tensor], None] = lambda _: None) -> None:
        """Give homes to the parameters of ``plan`` that have none yet.

        A float32 parameter of which 16 bits compute is a master, which leaves with its states; programs then
        gather its copy. Others stay: a copy would take the same room, or more. So do all in a lone process, whose
        graphs read parameters and gather none.

        Args:
            moments: tensors of float32 that an optimizer keeps of each parameter, for which room is reserved.
            moved: hears of each parameter that has other memory now, also where a later one fails.

        Raises:
            StorageError: there is no room.
        """
        for bucket in plan.buckets:
            params = [p for p in bucket.params if p.trainable and (p.sharded or plan.world_size == 1)]
            params = [p for p in params if p.name not in self._blocks] if bucket.homes.optimizer == "nvme" else []
            if not params:
                continue
            if self.arena is None:
                self.arena = self._open(self._needed(plan, moments))
                log.info("room for optimizer states on NVMe: %s", format_bytes(self.arena.size))
            block = self._block(bucket.name, params)
            masters = [p for p in params if _leaves(p)]
            if masters:  # all float32
                size = block.elements * torch.float32.itemsize
                self._masters[block] = self._allocated(size, f"parameters of bucket {bucket.name}")
            for p in masters:
                self._leave(p, block)
                moved(self._params[p.name])
            self._blocks.update(dict.fromkeys(block.begins, block))
            self.changes += 1

    def _needed(self, plan: Plan, moments: int) -> int:
        """Bytes for masters and states of all of the model: other frames read the rest of it."""
        trained = [local_tensor(p) for p in self._params.values() if p.requires_grad]
        leave = any(_leaves(p) for bucket in plan.buckets for p in bucket.params)
        # Of 16 bits an optimizer may keep a master.
        kinds = [moments + (leave or p.itemsize < torch.float32.itemsize) for p in trained]
        units = sum(k * -(-p.numel() // UNIT) for k, p in zip(kinds, trained, strict=True))
        return units * UNIT * torch.float32.itemsize

    def _block(self, name: str, params: Sequence[Param]) -> Block:
        begins, end = {}, 0
        for param in params:
            begins[param.name] = end
            end += -(-local_tensor(self._params[param.name]).numel() // _APART) * _APART
        return Block(name, begins, -(-end // UNIT) * UNIT)

    def _leave(self, described: Param, block: Block) -> None:
        """Move a parameter to its bucket's extent, and keep a copy of it that computes."""
        assert self.arena is not None
        param = self._params[described.name]
        local, extent = local_tensor(param), self._masters[block]
        offset = block.begins[described.name] * param.dtype.itemsize
        copy = local.detach().to(torch_dtype(described.compute_dtype))
        flat = local.detach().as_strided((local.numel(),), (1,))  # dense, in whatever order
        self.arena.wait(self.arena.write(extent, flat, offset=offset))
        home = mapped_tensor(self.arena, extent, param.dtype, (local.numel(),), offset)
        set_local(param, home.as_strided(local.shape, local.stride()))
        self._copies[described.name] = _Copy(home.data_ptr(), copy, _versions(param))

    def gathered(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Sequence[Tensor]:
        """What programs gather of ``params``, whose outward ``shards`` are given."""
        if not self._copies:
            return shards
        return [self._fresh(p.name, shard) for p, shard in zip(params, shards, strict=True)]

    def _fresh(self, name: str, shard: Tensor) -> Tensor:
        copy = self._copy(name)
        if copy is None:
            return shard
        param = self._params[name]
        now = _versions(param)
        if copy.seen != now:
            copy.tensor.copy_(local_tensor(param).detach())
            copy.seen = now
        return copy.tensor

    def _copy(self, name: str) -> _Copy | None:
        copy = self._copies.get(name)
        if copy is not None and local_tensor(self._params[name]).data_ptr() != copy.home:
            del self._copies[name]  # model.to(dtype) has given it other memory
            return None
        return copy

    def copy_of(self, param: Tensor) -> Tensor | None:
        """The copy that is gathered in place of ``param``, which an update writes too; None where it has none."""
        if not self._copies:
            return None
        copy = self._copy(self._names().get(id(param), ""))
        return copy.tensor if copy is not None else None

    def updated(self, params: Iterable[Tensor]) -> None:
        """The copies of ``params`` have been written together with them."""
        for param, copy in self._copied(params):
            copy.seen = _versions(param)

    def touched(self, params: Iterable[Tensor]) -> None:
        """Something has written to ``params`` that versions may not show: their copies are stale."""
        for _, copy in self._copied(params):
            copy.seen = None

    def _copied(self, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, _Copy]]:
        """Those of ``params`` that have a copy, with it."""
        if self._copies:
            names = self._names()
            known = ((param, self._copies.get(names.get(id(param), ""))) for param in params)
            yield from ((param, copy) for param, copy in known if copy is not None)

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._params.items()}

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
        if kind is None or self.arena is None or not value.numel():
            return kind is not None  # what is empty lies nowhere
        address = self.arena.map(kind.extent).address if self.arena.is_mapped(kind.extent) else 0
        return value.data_ptr() == address + place.begin * value.dtype.itemsize

    def extent(self, owner: Optimizer, block: Block, name: str, dtype: torch.dtype) -> Extent:
        """Where :meth:`state` has put the states of a bucket, or :data:`PARAMETER` the parameters themselves."""
        if name == PARAMETER:
            return self._masters[block]
        return self._kinds[owner][block, name, dtype].extent

    def _made(self, block: Block, name: str, dtype: torch.dtype, fill: float) -> Extent:
        assert self.arena is not None
        extent = self._allocated(block.elements * dtype.itemsize, f"{name} of bucket {block.name}")
        self._extents.add(extent)
        # Written and not mapped: pages that nobody reads would fill the memory.
        chunk = self.ring[0].view(dtype)
        chunk.fill_(fill)
        for begin in range(0, block.elements, len(chunk)):
            part = chunk[: min(len(chunk), block.elements - begin)]
            self.arena.wait(self.arena.write(extent, part, offset=begin * dtype.itemsize))
        return extent

    def _allocated(self, size: int, what: str) -> Extent:
        assert self.arena is not None
        if self.arena.free_bytes < size:
            self._reclaim()
        try:
            return self.arena.allocate(size)
        except StorageError as error:
            raise StorageError(
                f"{str(error).partition(chr(10))[0]}; they are for {what}",
                "give the backend more room: zerograph.backend(nvme='...GiB')",
            ) from None

    def _reclaim(self) -> None:
        """Free what belonged to optimizers that are gone."""
        assert self.arena is not None
        gc.collect()  # optimizers are in reference cycles
        held = {kind.extent for kinds in self._kinds.values() for kind in kinds.values()}
        for extent in self._extents - held:
            if not self.arena.is_mapped(extent):
                self.arena.free(extent)
                self._extents.remove(extent)

    @property
    def ring(self) -> list[Tensor]:
        """The slots that states pass through, made when they are first needed."""
        if not self._ring:
            largest = max(UNIT, *(block.elements for block in self._blocks.values()))
            size = min(SLOT, MOST_KINDS * largest * torch.float32.itemsize)
            self._ring = [huge_tensor(size) for _ in range(SLOTS)]
            assert self.arena is not None
            for slot in self._ring:
                self.arena.register(slot)
        return self._ring

    def on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of local ``tensors`` that are not on NVMe, and the copies of those that are."""
        arena = self.arena
        if arena is None:
            return list(tensors)
        return [t for t in tensors if not arena.maps(t)] + [copy.tensor for copy in self._copies.values()]

    @property
    def slots(self) -> int:
        """Bytes of the slots that states pass through."""
        return sum(slot.nbytes for slot in self._ring)

    def bytes(self) -> int:
        """On NVMe."""
        states = [kind.extent for kinds in self._kinds.values() for kind in kinds.values()]
        return sum(extent.bytes for extent in (*states, *self._masters.values()))


def _leaves(param: Param) -> bool:
    """Whether a parameter goes where its states go: 16 bits compute, of a copy that is gathered."""
    return param.sharded and param.trainable and param.is_master


def _versions(param: Tensor) -> tuple[int, int]:
    # An operation on a DTensor counts in one of the two, whichever it writes to.
    return param._version, local_tensor(param)._version


SLOTS = 3
"""One being read, one in use, one being written."""

SLOT = 64 * 2**20
"""Bytes of one slot; no less than a unit of each kind takes."""

MOST_KINDS = 5
"""That an update reads of the parameters of a bucket at a time: they themselves, masters, and at most three moments."""
