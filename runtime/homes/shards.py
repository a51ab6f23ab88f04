"""Where what belongs to the parameters of a backend lives: nobody else knows of tiers.

On the host are ordinary tensors: parameters, their gradients, and whatever an optimizer keeps of them. Programs gather
a copy on the device: one that stays there, or where parameters have left too, one for each gather.

Tensors on NVMe lie in extents of one arena. The shards of a bucket lie there one behind another, so that an update
moves many small ones in one transfer. Each kind of state (a moment, a master copy) has an extent of its own, in which a
parameter has the same place, counted in elements. Whoever does not know of extents, a checkpoint or a stock optimizer,
sees ordinary tensors: mappings of them (:func:`~zerograph.runtime.homes.store.mapped_tensor`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerograph.core.errors import StorageError
from zerograph.core.instructions import Gather
from zerograph.core.machine import Tier
from zerograph.core.placement import Unplanned, copy_tier, values_tier
from zerograph.core.plan import Bucket, Homes, Param, ParamTile, Plan, Update
from zerograph.core.program import Program
from zerograph.core.slots import ITEM, SLOT, SLOTS, slot_bytes
from zerograph.core.units import format_bytes
from zerograph.runtime import delayed
from zerograph.runtime.buffers import BufferPool, tile_of, torch_dtype
from zerograph.runtime.delayed import DelayedUpdate, ForwardUpdate
from zerograph.runtime.homes.background import Background
from zerograph.runtime.homes.blocks import UNIT, Block, Place, Run
from zerograph.runtime.homes.extents import Extent
from zerograph.runtime.homes.host import Transfer
from zerograph.runtime.homes.hosted import Copy, HostShards
from zerograph.runtime.homes.nvme import Arena, Priority, Ticket, huge_tensor
from zerograph.runtime.homes.saved import SavedActivations
from zerograph.runtime.homes.spilled import SpilledGradients
from zerograph.runtime.homes.store import mapped_tensor
from zerograph.runtime.torch_private import local_tensor, set_local, versions

log = logging.getLogger(__name__)

PARAMETER, COPY, GRADIENT = "parameter", "copy", "gradient"
"""The names that :meth:`ShardStore.extent` has for the parameters themselves, their copies in the compute dtype, and
their gradients: no optimizer has these for a state's name."""


@dataclass(slots=True)
class Fetch:
    """Shards, of which some may be on their way to the device.

    Attributes:
        under_way: reads from NVMe.
        on_host: places in ``shards`` of those that are on the host, or are read to there, and are to be copied from
            there.
        copies: from there.
    """

    shards: list[Tensor]
    under_way: list[Ticket] = field(default_factory=list)
    on_host: list[int] = field(default_factory=list)
    copies: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class _Kind:
    """One state of all parameters of a bucket that one optimizer keeps; ``given`` are the places it was asked for."""

    extent: Extent
    given: set[int] = field(default_factory=set)


class ReadsAhead(Protocol):
    """An update that streams states through the store's slots."""

    def read_ahead(self) -> None:
        """Begin to read what comes first into all slots but the last."""

    def forget(self) -> None:
        """Leave the slots to others."""


class ShardStore:
    """The homes of one backend's parameters; they are given once, by the first plan that has some for a parameter.

    Attributes:
        arena: with everything that is on NVMe; None while nothing is.
        host: what is there; None where its memory is the device's.
        saved: activations that wait for the backward off the device.
        changes: how often homes were given.
        updates: where what is on the host is updated, there or on the device.
        unsettled: delayed updates that are under way, which live until they are settled.
        following: updates that end inside of the next forward, and have not yet.
        half_done: by optimizer, why its last update changed a part of its parameters; until it loads a checkpoint.
    """

    def __init__(self, params: Mapping[str, Tensor], open_arena: Callable[[int], Arena | None]) -> None:
        """``params`` are the outward parameters by name, now and later; ``open_arena`` makes room for so many
        bytes, None where there may be no more."""
        self._params, self._open = params, open_arena
        self.host: HostShards | None = None
        self.saved = SavedActivations(lambda: self.host.memory if self.host is not None else None)
        self._blocks: dict[str, Block] = {}  # by parameter, of those of which anything is on NVMe
        self._gradients: dict[Block, Tier] = {}  # where those of its parameters go
        self._away: dict[str, int] = {}  # by parameter that is itself on the host or NVMe, its address there
        self._on_host: set[str] = set()  # of these, those on the host
        # By bucket, name and dtype. Not by parameter and name alone: two optimizers may hold one parameter.
        self._kinds: weakref.WeakKeyDictionary[Optimizer, dict[tuple[Block, str, torch.dtype], _Kind]]
        self._kinds = weakref.WeakKeyDictionary()
        self._extents: set[Extent] = set()
        self._early: dict[int, Extent] = {}  # by the address of its mapping, what was there before homes were given
        self._parameters: dict[Block, Extent] = {}
        self._copied: dict[Block, Extent] = {}
        self._copies: dict[str, Copy] = {}  # by parameter
        self._spilled: SpilledGradients | None = None
        self._ring: list[Tensor] = []
        # Updates run in the same order in each step. What ran last, and what ran behind each:
        self._last_update: Callable[[], ReadsAhead | None] = lambda: None
        self._behind: weakref.WeakKeyDictionary[ReadsAhead, Callable[[], ReadsAhead | None]]
        self._behind = weakref.WeakKeyDictionary()
        self._ahead: ReadsAhead | None = None
        self._stamp: list[int] = []  # when files were last written to, at the end of a backward
        self._fetched = BufferPool(huge_tensor)
        self._background = Background("zerograph-update")
        self.arena: Arena | None = None
        self.changes = 0
        self.updates: Update = "host"
        self.unsettled: set[DelayedUpdate] = set()
        self.following: set[ForwardUpdate] = set()
        self._keeps_pages = False
        self._gathers: dict[str, int] = {}  # by parameter, in the order in which forwards first gather them
        self.half_done: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()

    def settle(
        self,
        plan: Plan,
        moments: int,
        moved: Callable[[Tensor], None] = lambda _: None,
        rest: Homes | None = None,
        activations: int = 0,
    ) -> None:
        """Give homes to the parameters of ``plan`` that have none yet.

        :mod:`zerograph.core.placement` says where each lies, and what is gathered of it.

        Args:
            moments: tensors of float32 that an optimizer keeps of each parameter, for which room is reserved.
            moved: hears of each parameter that has other memory now, also where a later one fails.
            rest: how far parameters may leave that later plans hold; as far as those of ``plan``, unless given.
            activations: bytes of those that wait on NVMe for one backward, of all graphs that there are by now.

        Raises:
            StorageError: there is no room.
        """
        for update in list(self.following):
            update.settle()  # a frame is compiled between a step and the end of its forward: memory moves
        self.updates = plan.update
        own = {param.name: bucket.homes for bucket in plan.buckets for param in bucket.params}
        masters = any(p.is_master for b in plan.buckets for p in b.params)
        if activations > self.saved.room:
            self.reserve(own, rest or plan.farthest, masters, moments, activations=activations)
            lacking = activations - self.saved.room
            more = self._open(lacking) if lacking > 0 else None  # the first one was made before they were known
            if more is not None:
                self.saved.arenas.append(more)
            self.saved.room = max(self.saved.room, activations)
        for bucket in plan.buckets:
            if "host" in (bucket.homes.parameters, bucket.homes.optimizer):
                self._move_to_host(bucket, moved)
            if bucket.homes.optimizer != "nvme":
                continue
            new = [p for p in bucket.params if p.sharded and p.name not in self._blocks]
            away = bucket.homes.parameters == "nvme"
            kinds: dict[tuple[bool, str], list[Param]] = {}
            for param in new if away else [p for p in new if p.trainable]:
                kinds.setdefault((param.trainable, param.dtype), []).append(param)
            for params in kinds.values():
                self.reserve(own, rest or plan.farthest, masters, moments)
                self._house(bucket, params, moved)
                self.changes += 1
        for name in own if self._early else ():
            self._bring_back(name, moved)

    def _there(self) -> HostShards:
        assert self.host is not None  # where a plan has something on the host
        return self.host

    def _move_to_host(self, bucket: Bucket, moved: Callable[[Tensor], None]) -> None:
        """Give parameters of a bucket their home on the host, where they are updated, or live and are not; what is
        gathered of them follows, on the device or beside them."""
        homes = bucket.homes
        for described in bucket.params:
            name = described.name
            self._copy(name)
            if not described.sharded or name in self._away or values_tier(described, homes, split=True) != "host":
                continue
            self._bring_back(name, moved)
            copy = self._there().copy_of(described, homes)
            self._away[name] = local_tensor(self._params[name]).data_ptr()
            self._on_host.add(name)
            if copy is not None:
                self._copies[name] = copy
            self.changes += 1

    def _house(self, bucket: Bucket, params: Sequence[Param], moved: Callable[[Tensor], None]) -> None:
        """Give ``params`` of a bucket, of one dtype, their homes."""
        counts = {p.name: local_tensor(self._params[p.name]).numel() for p in params}
        block = Block.of(bucket.name, torch_dtype(params[0].dtype), counts)
        homes, split = bucket.homes, self.host is not None
        leaving = [p for p in params if values_tier(p, homes, split) == "nvme"]
        if leaving:
            size = block.elements * block.dtype.itemsize
            extent = self._allocated(size, f"parameters of bucket {block.name}")
            try:
                for param in leaving:
                    self._carry(param, block, extent)
            except BaseException:  # all of them are where they were
                assert self.arena is not None
                self.arena.free(extent)
                raise
            self._parameters[block] = extent
        if any(copy_tier(p, homes, split) == "nvme" for p in leaving):
            self._copied[block] = self._allocated(block.elements * 2, f"copies of bucket {block.name}")
        for param in leaving:
            self._leave(param, block, homes)
            moved(self._params[param.name])
        self._blocks.update(dict.fromkeys(block.begins, block))
        self._gradients[block] = homes.gradients

    def reserve(
        self,
        own: Mapping[str, Homes],
        rest: Homes,
        masters: bool,
        moments: int,
        *,
        early: bool = False,
        activations: int = 0,
    ) -> None:
        """Make room for all of the model, where there is none yet: other frames read the rest of it.

        Args:
            own: homes by parameter, as far as they are known.
            rest: homes of the others.
            masters: 16 bits compute, so that parameters in float32 are masters.
            moments: as :meth:`settle` has it.
            early: parameters will lie apart at first, until they are moved to their buckets.
            activations: as :meth:`settle` has it.

        Raises:
            StorageError: there is no room.
        """
        if self.arena is not None:
            return
        single, total, split = torch.float32.itemsize, 0, self.host is not None
        for name, param in self._params.items():
            homes = own.get(name, rest)
            if homes.optimizer != "nvme":
                continue
            # Frozen ones count as if they trained, since they may later.
            unplanned = Unplanned(True, masters and param.dtype == torch.float32)
            each = param.itemsize * ((values_tier(unplanned, homes, split) == "nvme") + early)
            each += torch.bfloat16.itemsize * (copy_tier(unplanned, homes, split) == "nvme")
            if param.requires_grad:
                # Of 16 bits an optimizer may keep a master.
                each += (moments + (param.itemsize < single)) * single
                each += param.itemsize * (homes.gradients == "nvme")
            total += -(-local_tensor(param).numel() // UNIT) * UNIT * each
        self.arena = self._open(total + activations)
        assert self.arena is not None  # the first one
        self.saved.arenas, self.saved.room = [self.arena], self.arena.size - total
        log.info("room on NVMe: %s", format_bytes(self.arena.size))

    def early(self, like: Tensor) -> Tensor:
        """Memory on NVMe for a shard as ``like``, filled before anything is planned; :meth:`settle` moves it from
        there."""
        assert self.arena is not None
        extent = self._allocated(like.nbytes, "a parameter that is materialized")
        flat = mapped_tensor(self.arena, extent, like.dtype, (like.numel(),))
        self._early[flat.data_ptr()] = extent
        return flat.as_strided(like.shape, like.stride())

    def forget_early(self) -> None:
        """Give back the room of what :meth:`early` gave and is no parameter now: something failed before it was."""
        kept = {local_tensor(param).data_ptr() for param in self._params.values()}
        self._extents.update(self._early.pop(address) for address in [*self._early] if address not in kept)
        if self.arena is not None:
            self._reclaim()

    def let_go(self, tensor: Tensor) -> None:
        """Keep nothing of what :meth:`early` gave in this process's memory."""
        extent = self._early.get(tensor.data_ptr())
        if extent is not None and self.arena is not None:
            self.arena.map(extent).drop(0, tensor.nbytes)

    def _carry(self, described: Param, block: Block, extent: Extent) -> None:
        """Write the values of a parameter to its bucket's extent."""
        assert self.arena is not None
        local = local_tensor(self._params[described.name])
        offset, early = block.begins[described.name] * local.dtype.itemsize, self._early.get(local.data_ptr())
        if early is not None:
            self._move(early, extent, offset, local.nbytes)
        else:
            flat = local.detach().as_strided((local.numel(),), (1,))  # dense, in whatever order
            self.arena.wait(self.arena.write(extent, flat, offset=offset))

    def _leave(self, described: Param, block: Block, homes: Homes) -> None:
        """Let a parameter be what its bucket's extent holds of it; keep a copy that computes where it is a master, or
        its home is nearer."""
        assert self.arena is not None
        param = self._params[described.name]
        local, extent = local_tensor(param), self._parameters[block]
        offset = block.begins[described.name] * param.dtype.itemsize
        copy, dtype = None, torch_dtype(described.compute_dtype)
        tier = copy_tier(described, homes, split=self.host is not None)
        if tier == "nvme":
            copy = Copy(None, dtype, None)
        elif self.host is not None:
            copy = self.host.copy_of(described, homes)
        elif tier == "device":
            copy = Copy(local.detach().to(dtype), dtype, versions(param))
        if copy is not None:
            self._copies[described.name] = copy
        early = self._early.pop(local.data_ptr(), None)
        if early is not None:
            self._extents.add(early)  # which is free when nobody maps it
        home = mapped_tensor(self.arena, extent, param.dtype, (local.numel(),), offset)
        set_local(param, home.as_strided(local.shape, local.stride()))
        self._away[described.name] = home.data_ptr()

    def _bring_back(self, name: str, moved: Callable[[Tensor], None]) -> None:
        """Put a parameter that :meth:`early` has made, and that stays, into memory."""
        local = local_tensor(self._params[name])
        early = self._early.pop(local.data_ptr(), None)
        if early is not None:
            set_local(self._params[name], local.detach().clone())
            self._extents.add(early)
            moved(self._params[name])

    def _move(self, source: Extent, target: Extent, offset: int, size: int) -> None:
        """Copy ``size`` bytes of an extent to a place in another one, a slot at a time."""
        assert self.arena is not None
        slot = self._slot()
        for begin in range(0, size, len(slot)):
            part = slot[: min(len(slot), size - begin)]
            self.arena.wait(self.arena.read(source, part, offset=begin))
            self.arena.wait(self.arena.write(target, part, offset=offset + begin))

    # ---- what programs gather

    def know_gathers(self, forward: Program) -> None:
        """Number the gathers of ``forward``, in whose order parameters may be updated inside of it."""
        first = 1 + max(self._gathers.values(), default=-1)
        for number, instruction in enumerate(forward.instructions, first):
            for param in instruction.params if isinstance(instruction, Gather) else ():
                self._gathers.setdefault(param.name, number)

    def gathers(self) -> dict[int, int]:
        """By ``id`` of a parameter, the number of the first gather of it."""
        return {id(self._params[name]): number for name, number in self._gathers.items() if name in self._params}

    def neighbours(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The other parameters on NVMe that an update of ``params`` reads and writes again: those of their buckets."""
        names = self._names() if self._parameters else {}
        own = {names[id(p)] for p in params if id(p) in names}
        blocks = dict.fromkeys(self._blocks[name] for name in own if name in self._blocks)
        beside = (name for block in blocks if block in self._parameters for name in block.begins)
        return [self._params[name] for name in beside if name not in own]

    def end_forward_updates(self) -> None:
        """A backward begins, whose forward has gathered what it reads: let updates inside of that end."""
        if self.following:
            for update in list(self.following):
                update.settle()
        if self._keeps_pages:
            self.drop_pages()

    def start_fetch(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Fetch:
        """Begin to bring to the device what programs gather of ``params``, whose outward ``shards`` are given."""
        return self.copy_up(self.start_read(params, shards))

    def start_read(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Fetch:
        """Begin to bring from NVMe to the host, or to a device that has no other memory, what :meth:`copy_up` brings to
        the device."""
        for update in list(self.following):
            update.wait_for({self._gathers[p.name] for p in params if p.name in self._gathers})
        if not self._away and self.host is None:
            return Fetch([tile_of(p, shard) for p, shard in zip(params, shards, strict=True)])
        fetch, reads, found = Fetch([]), dict[Extent, tuple[Block, torch.dtype, list[str]]](), dict[str, Tensor]()
        on_host = set[str]()
        for param, shard in zip(params, shards, strict=True):
            name = param.name
            copy = self._fresh(name)
            # Of another memory is what torch.func.functional_call has put in a parameter's place.
            if not tile_of(param, shard).numel() or shard.data_ptr() != self._away.get(name):
                found[name] = shard
                if self.host is not None and self.host.is_home(shard):
                    found[name] = shard.detach()  # nothing was planned yet
                    on_host.add(name)
            elif copy is not None and copy.tensor is not None:
                copy.arrive()
                found[name] = copy.tensor
            elif copy is not None and copy.cast is not None:
                found[name] = copy.cast
                on_host.add(name)
            elif name in self._on_host:
                found[name] = shard.detach()
                on_host.add(name)
            else:
                block = self._blocks[name]
                kept = (self._parameters[block], block.dtype)
                extent, dtype = kept if copy is None else (self._copied[block], copy.dtype)
                if isinstance(param, ParamTile):
                    found[name] = self._read_tile(extent, block, dtype, param, fetch.under_way)
                else:
                    reads.setdefault(extent, (block, dtype, []))[2].append(name)
                if self.host is not None:
                    on_host.add(name)
                continue
            found[name] = tile_of(param, found[name])
        for extent, (block, dtype, names) in reads.items():
            for run in block.reads(names):
                found |= self._read(extent, block, dtype, run, fetch.under_way)
        fetch.shards = [found[p.name] for p in params]
        fetch.on_host = [place for place, p in enumerate(params) if p.name in on_host]
        return fetch

    def copy_up(self, fetch: Fetch) -> Fetch:
        """Begin to copy to the device what of ``fetch`` is on the host, or will be."""
        if fetch.on_host:
            reads, fetch.under_way = fetch.under_way, []
            sources = {place: fetch.shards[place] for place in fetch.on_host}
            targets = self._there().fetch(sources, lambda: self._wait_for(reads), fetch.copies)
            fetch.shards = [targets.get(place, shard) for place, shard in enumerate(fetch.shards)]
            fetch.on_host = []
        return fetch

    def _wait_for(self, reads: Sequence[Ticket]) -> None:
        for ticket in reads:
            assert self.arena is not None
            self.arena.wait(ticket)

    def finish_fetch(self, fetch: Fetch) -> list[Tensor]:
        """The shards, in the dtype that they live in.

        Raises:
            StorageError: a transfer failed.
        """
        self._wait_for(fetch.under_way)
        while fetch.copies:
            fetch.copies.pop().wait()
        return fetch.shards

    def _read(
        self, extent: Extent, block: Block, dtype: torch.dtype, run: Run, under_way: list[Ticket]
    ) -> dict[str, Tensor]:
        assert self.arena is not None
        memory = self._fetched.take((run.end - run.begin) * dtype.itemsize).view(dtype)
        under_way.append(self.arena.read(extent, memory, Priority.now, offset=run.begin * dtype.itemsize))
        found = {}
        for name in run.names:
            like = local_tensor(self._params[name])
            part = memory[block.begins[name] - run.begin : block.ends[name] - run.begin]
            found[name] = part.as_strided(like.shape, like.stride(), part.storage_offset())
        return found

    def _read_tile(
        self, extent: Extent, block: Block, dtype: torch.dtype, tile: ParamTile, under_way: list[Ticket]
    ) -> Tensor:
        assert self.arena is not None
        like = local_tensor(self._params[tile.name])
        if not like.is_contiguous():  # its rows lie all over it
            (run,) = block.reads({tile.name})
            return tile_of(tile, self._read(extent, block, dtype, run, under_way)[tile.name])
        rows = tile_of(tile, like)
        first = block.begins[tile.name] + tile.begin * like.stride(0)
        begin, end = first // UNIT * UNIT, -(-(first + rows.numel()) // UNIT) * UNIT
        memory = self._fetched.take((end - begin) * dtype.itemsize).view(dtype)
        under_way.append(self.arena.read(extent, memory, Priority.now, offset=begin * dtype.itemsize))
        return memory[first - begin :][: rows.numel()].view(rows.shape)

    def _fresh(self, name: str) -> Copy | None:
        """The copy that is gathered in place of a parameter, with its values of now; None where it has none."""
        copy = self._copy(name)
        if copy is None:
            return None
        param = self._params[name]
        now = versions(param)
        if copy.seen != now:
            if copy.cast is not None:
                self._there().wait_for_parameters()
                copy.cast.copy_(local_tensor(param).detach())
            elif copy.tensor is not None and self.host is not None:
                self.host.upload({name: copy})
            elif copy.tensor is not None:
                copy.tensor.copy_(local_tensor(param).detach())
            else:
                self._cast(name, copy.dtype)
            copy.seen = now
        return copy

    def _cast(self, name: str, dtype: torch.dtype) -> None:
        """Write the copy of a parameter on NVMe anew, a slot at a time."""
        assert self.arena is not None
        local, block = local_tensor(self._params[name]).detach(), self._blocks[name]
        flat, slot = local.as_strided((local.numel(),), (1,)), self._slot().view(dtype)
        for begin in range(0, local.numel(), len(slot)):
            part = flat[begin : begin + len(slot)]
            cast = slot[: len(part)].copy_(part)
            offset = (block.begins[name] + begin) * dtype.itemsize
            self.arena.wait(self.arena.write(self._copied[block], cast, offset=offset))

    def _copy(self, name: str) -> Copy | None:
        if name in self._away and local_tensor(self._params[name]).data_ptr() != self._away[name]:
            del self._away[name]  # model.to(dtype) has given it other memory
            self._on_host.discard(name)
            self._copies.pop(name, None)
        return self._copies.get(name)

    def copy_of(self, param: Tensor) -> Tensor | None:
        """The copy that an update of ``param`` writes too; None where it has none in the memory of the update."""
        name = self._names().get(id(param), "") if self._copies else ""
        copy = self._copy(name)
        if copy is None:
            return None
        # On a split machine an update on the host writes what is there; what is elsewhere follows.
        if self.host is not None:
            return copy.cast if name in self._on_host and self.updates == "host" and not copy.is_late else None
        return copy.tensor

    def set_apart(self, params: Iterable[Tensor]) -> set[int]:
        """Those of ``params``, by ``id``, that may be updated while programs compute, which gather copies of them. From
        now on no update writes to these copies: they follow it (:meth:`updated`)."""
        apart = set()
        for name, copy in self._having_copies(params):
            if name in self._on_host:
                apart.add(id(self._params[name]))
                self.changes += not copy.is_late
                copy.is_late = True
        return apart

    def settle_updates(self, names: Iterable[str]) -> None:
        """Let copies follow delayed updates of the parameters ``names``."""
        delayed.settle(self._params[name] for name in names if name in self._params)

    def leave_copies(self, params: Iterable[Tensor]) -> Callable[[], None]:
        """Let programs compute with copies of ``params`` as these are now; returns what waits until ``params`` may be
        written to."""
        for name, _ in self._having_copies(params):
            self._fresh(name)
        return self._there().ascent()

    def begin_to_follow(self, name: str) -> Tensor | None:
        """The copy, flat, that is to be brought the values that an update streams of a parameter; None where it has
        none, or streams that too. It counts as stale until :meth:`updated` says otherwise."""
        copy = self._copy(name) if self.host is not None else None
        if copy is None:
            return None
        copy.seen = None
        copy.renew()
        found = copy.tensor if copy.cast is None else copy.cast
        return found.as_strided((found.numel(),), (1,)) if found is not None else None

    def through_device(self, param: Tensor) -> str:
        """The name of ``param``, if it is on the host and updated on the device; else empty."""
        name = self._names().get(id(param), "") if self.updates == "device" else ""
        self._copy(name)
        return name if name in self._on_host else ""

    def streamed(self, param: Tensor) -> tuple[tuple[str, torch.dtype], ...]:
        """The tensors of ``param`` on NVMe besides states, by name and dtype: the parameter itself, and its copy."""
        name = self._names().get(id(param), "") if self._away else ""
        copy = self._copy(name)
        if name not in self._away or name in self._on_host:
            return ()
        streams = copy is not None and copy.tensor is None and copy.cast is None
        copies = ((COPY, copy.dtype),) if copy is not None and streams else ()
        return ((PARAMETER, param.dtype), *copies)

    def updated(self, params: Iterable[Tensor]) -> None:
        """The copies of ``params`` have been written together with them; those on the device of what is on the host
        follow from now on."""
        rising = {}
        for name, copy in self._having_copies(params):
            if copy.is_late and copy.cast is not None:
                self._fresh(name)
            copy.seen = versions(self._params[name])
            if name in self._on_host and self.updates == "host":
                rising[name] = copy
        if rising:
            self._there().upload(rising)

    def touched(self, params: Iterable[Tensor]) -> None:
        """Something has written to ``params`` that versions may not show: their copies are stale."""
        for _, copy in self._having_copies(params):
            copy.seen = None

    def _having_copies(self, params: Iterable[Tensor]) -> Iterator[tuple[str, Copy]]:
        if self._copies:
            names = self._names()
            known = (names.get(id(param), "") for param in params)
            yield from ((name, copy) for name in known if (copy := self._copy(name)) is not None)

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._params.items()}

    # ---- gradients

    def spill(self, params: Sequence[Param], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Begin to move gradients to their homes, where there are some; returns what autograd gets in their places.

        Raises:
            StorageError: there is no room, or a transfer failed.
        """
        made = {p.name: self._own(p, grad) for p, grad in zip(params, grads, strict=True) if grad is not None}
        away: dict[Tier, dict[str, Tensor]] = {}
        for name, grad in made.items():
            away.setdefault(self._home_of_gradient(name, grad.dtype), {})[name] = grad
        given: dict[str, Tensor | None] = dict(self._there().spill(away["host"])) if "host" in away else {}
        given |= self._spill_to_nvme(away.get("nvme", {}))
        # model.to(dtype) has brought the others here.
        return [given.get(p.name, grad) for p, grad in zip(params, grads, strict=True)]

    def spill_tile(self, tile: ParamTile, grad: Tensor, into: Tensor | None) -> Tensor | None:
        """Begin to move a tile of a gradient, of which the first comes first, to its home.

        Returns:
            The tensor for autograd in place of the whole gradient: for the first tile as :meth:`spill`, then ``into``,
            which that gave.

        Raises:
            StorageError: there is no room, or a transfer failed.
        """
        like, grad = local_tensor(self._params[tile.name]).detach(), self._own(tile, grad)
        if tile.begin and not len(grad):
            return into
        home = self._home_of_gradient(tile.name, grad.dtype)
        if home == "host":
            return self._there().spill_tile(tile, grad, into)
        if home == "nvme" and like.is_contiguous():
            given = self._to_nvme().spill_tile(self._blocks[tile.name], tile, grad)
            return given if tile.begin == 0 else into
        # It leaves as a whole, if at all: its rows lie all over it.
        if tile.begin == 0:
            into = torch.empty_like(like, dtype=grad.dtype, device=grad.device)
        assert into is not None
        if self.host is not None:
            self.host.wait_for_gradients()
        tile_of(tile, into).copy_(grad)
        return into if home == "device" or tile.end < len(like) else self._spill_to_nvme({tile.name: into})[tile.name]

    def _own(self, param: Param, grad: Tensor) -> Tensor:
        """A reduced gradient, or a tile of it, without the rows that pad the last shards."""
        rows = tile_of(param, local_tensor(self._params[param.name]))
        return grad[: len(rows)] if isinstance(param, ParamTile) else grad

    def _home_of_gradient(self, name: str, dtype: torch.dtype) -> Tier:
        """Where a gradient in ``dtype`` is to go."""
        block = self._blocks.get(name)
        if block is None:
            return "host" if name in self._on_host or self._is_apart(name) else "device"
        home = self._gradients[block]
        # model.to(dtype) has brought the parameter here.
        return "device" if home == "nvme" and dtype != block.dtype else home

    def stage(self, params: Sequence[Param], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Begin to copy gradients, or tiles of them, to the host, from where :meth:`spill` moves them on."""
        made = {p.name: self._own(p, grad) for p, grad in zip(params, grads, strict=True) if grad is not None}
        return [*self._there().stage(made).values()]

    def left_behind(self, params: Sequence[Param]) -> bool:
        """Whether one of ``params`` is in another memory than what a backward makes, as an earlier plan has it."""
        return any(self._is_apart(p.name) for p in params)

    def _is_apart(self, name: str) -> bool:
        return self.host is not None and self.host.is_home(local_tensor(self._params[name]))

    def _spill_to_nvme(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        by_block: dict[Block, dict[str, Tensor]] = {}
        for name, grad in grads.items():
            by_block.setdefault(self._blocks[name], {})[name] = grad
        given: dict[str, Tensor | None] = {}
        for block, own in by_block.items():
            given |= self._to_nvme().spill(block, own)
        return given

    def _to_nvme(self) -> SpilledGradients:
        """The writer of gradients to NVMe; nothing else uses the slots."""
        assert self.arena is not None
        if self._spilled is None:
            after_copies = self.host.memory.after_copies if self.host is not None else None
            assert (after_copies is None) == (self.host is None)  # NVMe behind an accelerator is refused
            slots, allocated = self._gradient_slots, self._allocated
            self._spilled = SpilledGradients(self._params, self.arena, slots, allocated, after_copies)
        self._background.wait()
        return self._spilled

    def read_ahead(self) -> None:
        """A backward begins: what the update behind it needs first may come now."""
        if self._background.is_idle:
            self._read_next()

    def _read_next(self) -> None:
        last = self._last_update()
        update = self._behind[last]() if last is not None else None
        if update is not None and self._ahead is None:
            self._ahead = update
            update.read_ahead()
            self.stamp()

    def stamp(self) -> None:
        """A backward is at its end: what is written from here on, the user writes."""
        if self.arena is not None and self._ahead is not None:
            self._stamp = self.arena.modified()

    @property
    def is_as_left(self) -> bool:
        """Whether nothing on NVMe was written since."""
        return self.arena is not None and self._stamp == self.arena.modified()

    def has_run(self, update: ReadsAhead) -> None:
        """An update has streamed states through the slots; the next one is the one that came behind it before, or it
        itself where none did."""
        last, self._last_update = self._last_update(), weakref.ref(update)
        if last is not None:
            self._behind[last] = weakref.ref(update)
        self._behind.setdefault(update, weakref.ref(update))

    def take_slots(self, update: ReadsAhead | None = None) -> None:
        """The slots are wanted, by ``update`` or somebody else, or what was read ahead may be old."""
        self._background.wait()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead is not update:
            ahead.forget()

    def wait_for_parameters(self) -> None:
        """Return when no program reads what is on the host any more."""
        if self.host is not None:
            self.host.wait_for_parameters()

    def wait_for_gradients(self) -> None:
        """Return when all that :meth:`spill` began is done.

        Raises:
            StorageError: a transfer failed.
        """
        if self.host is not None:
            self.host.wait_for_gradients()
        if self._spilled is not None:
            self._spilled.wait()

    def arrival(self) -> Callable[[], None]:
        """A function that waits for the gradients that are on their way to the host now."""
        return self._there().arrival()

    def in_background(self, work: Callable[[], None], *, more: bool = False) -> Future[None]:
        """Begin ``work``, which may use the slots, beside the caller: no other work uses them meanwhile. If ``more``
        will come soon, what it needs is read ahead behind it."""
        if self._spilled is not None:
            self._spilled.wait()

        def works() -> None:
            work()
            if more:
                self._read_next()

        return self._background.start(works)

    def abandon(self) -> None:
        """A program failed: wait for what it wrote, whatever becomes of it, and for updates beside it."""
        for update in list(self.following):
            with contextlib.suppress(Exception):  # the program's error is on its way; half_done has this one
                update.settle()
        if self.host is not None:
            self.host.abandon()
        self.saved.abandon()
        if self._spilled is not None:
            self._spilled.abandon()

    def drop_pages(self) -> None:
        """Give back the memory of what somebody touched since the last step: a stock optimizer, a checkpoint."""
        self._keeps_pages = bool(self.following)  # they use the slots; when they have ended is soon enough
        if self._keeps_pages:
            return
        self.take_slots()  # a step that was skipped
        if self.arena is not None:
            self.arena.drop_pages(self._parameters.values())

    def refuse_half_done(self) -> None:
        """Raises:
        StorageError: an update ended half done.
        """
        for update in list(self.following) if self.half_done else ():
            update.settle()  # one that failed beside the caller says itself why
        for why in list(self.half_done.values()):
            raise StorageError(
                f"the last update ended half done ({why}): some parameters and states are those after it",
                "load a checkpoint of the model and of its optimizer",
            )

    def gradients(self, block: Block) -> tuple[Extent, int] | None:
        """Where the last gradients of ``block`` are, and the address of their mapping; None where they are in memory,
        or nobody holds them."""
        return self._spilled.home(block) if self._spilled is not None else None

    def stay(self, block: Block) -> bool:
        """Whether the gradients of ``block`` are on a device that has another memory than the host, which updates."""
        return self.host is not None and self._gradients[block] == "device"

    def squares(self, address: int) -> list[float] | None:
        """Sums of squares of the gradient at ``address`` (see :mod:`~zerograph.runtime.homes.spilled`); else None."""
        if self._spilled is None:
            return None
        self._background.wait()  # for the slots
        return self._spilled.squares(address)

    @property
    def spills(self) -> bool:
        """Whether gradients go to NVMe."""
        return self._spilled is not None

    # ---- states of optimizers

    def places(self) -> dict[int, Place]:
        """Where the states of parameters are that have left the device, by ``id`` of the parameter."""
        blocks = self._blocks
        return {
            id(p): Place(blocks[name], blocks[name].begins[name])
            for name, p in self._params.items()
            if name in blocks and p.requires_grad
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
        """Where :meth:`state` has put the states of a bucket, or :data:`PARAMETER` and
        :data:`COPY` what these are."""
        if name in (PARAMETER, COPY):
            return (self._parameters if name == PARAMETER else self._copied)[block]
        return self._kinds[owner][block, name, dtype].extent

    def _made(self, block: Block, name: str, dtype: torch.dtype, fill: float) -> Extent:
        assert self.arena is not None
        extent = self._allocated(block.elements * dtype.itemsize, f"{name} of bucket {block.name}")
        self._extents.add(extent)
        # Written and not mapped: pages that nobody reads would fill the memory.
        chunk = self._slot().view(dtype)
        chunk.fill_(fill)
        for begin in range(0, block.elements, len(chunk)):
            part = chunk[: min(len(chunk), block.elements - begin)]
            self.arena.wait(self.arena.write(extent, part, offset=begin * dtype.itemsize))
        return extent

    def _allocated(self, size: int, what: str) -> Extent:
        assert self.arena is not None
        if self.arena.free_bytes < size:
            self._reclaim()
            if self._spilled is not None:
                self._spilled.reclaim(all_of_them=True)
            self.saved.let_go()
        try:
            return self.arena.allocate(size)
        except StorageError as error:
            raise StorageError(
                f"{str(error).partition(chr(10))[0]}; they are for {what}",
                "give the backend more room: zerograph.backend(nvme='...GiB')",
            ) from None

    def _reclaim(self) -> None:
        """Free what belonged to optimizers that are gone."""
        self.take_slots()  # which keep states that are to be read ahead
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
            # Before there are blocks, room for one as large as any may be.
            largest = max((block.elements for block in self._blocks.values()), default=SLOT)
            size = max(slot_bytes(largest, SLOT), slot_bytes(UNIT))
            self._ring = [huge_tensor(size) for _ in range(SLOTS)]
            assert self.arena is not None
            for slot in self._ring:
                self.arena.register(slot)
        return self._ring

    @property
    def _gradient_slots(self) -> list[Tensor]:
        """Parts of the last slot: while gradients leave, states are read ahead into the others."""
        *_, last = self.ring
        size = len(last) // SLOTS // (UNIT * ITEM) * UNIT * ITEM
        return [last[i * size : (i + 1) * size] for i in range(SLOTS)]

    def _slot(self) -> Tensor:
        """One of the ring, in which nothing is under way."""
        self.wait_for_gradients()
        self.take_slots()
        return self.ring[0]

    def on_device(self, held: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        """The tensors on the device among local ones of parameters, by name, and copies there of others."""
        arena = self.arena
        there = self._names_on_host
        here = [t for name, t in held if name not in there and (arena is None or not arena.maps(t))]
        return here + [copy.tensor for copy in self._copies.values() if copy.tensor is not None]

    @property
    def _names_on_host(self) -> set[str]:
        """The parameters that are there, as their plan has it or an earlier one."""
        return {*self._on_host, *(name for name in self._params if self._is_apart(name))}

    @property
    def slots(self) -> int:
        """Bytes of the slots that states pass through."""
        return sum(slot.nbytes for slot in self._ring)

    @property
    def fetched(self) -> int:
        """Bytes of the buffers that shards are read into."""
        return self._fetched.bytes

    def on_host(self) -> dict[str, int]:
        """Bytes on the host, of what is a memory of its own, by what they are for; without states, which are the
        optimizer's."""
        if self.host is None:
            return {}
        casts = [copy.cast for copy in self._copies.values() if copy.cast is not None]
        held = {
            "parameters": sum(local_tensor(self._params[name]).nbytes for name in self._names_on_host),
            "copies": sum(cast.nbytes for cast in casts),
            "gradients": self.host.gradients,
            "slots": self.host.slots,
            "activations": self.saved.on_host,
        }
        return {what: size for what, size in held.items() if size}

    def bytes(self) -> dict[str, int]:
        """On NVMe, by what they are for."""
        states = [kind.extent for kinds in self._kinds.values() for kind in kinds.values()]
        held = {
            "parameters": sum(extent.bytes for extent in self._parameters.values()),
            "copies": sum(extent.bytes for extent in self._copied.values()),
            "gradients": self._spilled.bytes if self._spilled is not None else 0,
            "optimizer states": sum(extent.bytes for extent in states),
            "activations": self.saved.bytes,
        }
        return {what: size for what, size in held.items() if size}
