"""What programs gather, brought to the device from where it lies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zerograph.core.instructions import Gather
from zerograph.core.plan import Param, ParamTile
from zerograph.core.program import Program
from zerograph.core.timeline import WAIT
from zerograph.runtime.buffers import BufferPool, tile_of
from zerograph.runtime.delayed import DelayedUpdate
from zerograph.runtime.offload.blocks import UNIT, Block, ShardRun
from zerograph.runtime.offload.copies import Copies
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.host import Transfer
from zerograph.runtime.offload.locations import Locations
from zerograph.runtime.offload.nvme import Priority, Ticket, huge_tensor
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.timings import Purpose, Timings


class FetchedRun(NamedTuple):
    """Elements of a block's parameters, from ``begin`` on, as NVMe has them; in ``memory`` when ``read`` has ended."""

    block: Block
    begin: int
    memory: Tensor
    read: Ticket


@dataclass(slots=True)
class Fetch:
    """Shards, of which some may be on their way to the device.

    Attributes:
        under_way: reads from NVMe.
        runs: what these bring that no other bucket's update changes.
        on_host: places in ``shards`` of those that are on the host, or are read to there, and are to be copied from
            there.
        copies: from there.
        whose: one of them is, by which a recording knows the bucket.
    """

    shards: list[Tensor]
    under_way: list[Ticket] = field(default_factory=list)
    runs: list[FetchedRun] = field(default_factory=list)
    on_host: list[int] = field(default_factory=list)
    copies: list[Transfer] = field(default_factory=list)
    whose: str = ""


class Fetches:
    """Reads and copies shards for gathers.

    Attributes:
        following: updates that end inside of the next forward, and have not yet: a gather waits for its own.
    """

    def __init__(self, room: ArenaRoom, locations: Locations, copies: Copies, timings: Timings) -> None:
        self._room, self._locations, self._copies, self._timings = room, locations, copies, timings
        self._buffers = BufferPool(huge_tensor)  # where the host has no memory of its own, which stages
        self._order: dict[str, int] = {}  # by parameter, in the order in which forwards first gather them
        self.following: set[DelayedUpdate] = set()

    def know_gathers(self, forward: Program) -> None:
        """Number the gathers of ``forward``, in whose order parameters may be updated inside of it."""
        first = 1 + max(self._order.values(), default=-1)
        for number, instruction in enumerate(forward.instructions, first):
            for param in instruction.params if isinstance(instruction, Gather) else ():
                self._order.setdefault(param.name, number)

    def gathers(self) -> dict[int, int]:
        """By ``id`` of a parameter, the number of the first gather of it."""
        params = self._locations.params
        return {id(params[name]): number for name, number in self._order.items() if name in params}

    def settle_following(self) -> None:
        """Let updates inside of the forward end."""
        for update in list(self.following):
            update.settle()

    def _wait_for_updates(self, params: Sequence[Param]) -> None:
        if not self.following:
            return
        begin, numbers = time.time_ns(), {self._order[p.name] for p in params if p.name in self._order}
        waited = [update.wait_for(numbers) for update in list(self.following)]
        if any(waited):
            self._timings.add("gather", Purpose(WAIT, params[0].name), begin, time.time_ns())

    def start(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Fetch:
        """Begin to bring to the device what programs gather of ``params``, whose outward ``shards`` are given."""
        return self.copy_up(self.start_read(params, shards))

    def start_read(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Fetch:
        """Begin to bring from NVMe to the host, or to a device that has no other memory, what :meth:`copy_up` brings to
        the device."""
        self._wait_for_updates(params)
        at, host = self._locations, self._locations.host
        if not at.offloaded and host is None:
            return Fetch([tile_of(p, shard) for p, shard in zip(params, shards, strict=True)])
        fetch, found = Fetch([], whose=params[0].name), dict[str, Tensor]()
        reads = dict[Extent, tuple[Block, torch.dtype, list[str]]]()
        on_host = set[str]()
        for param, shard in zip(params, shards, strict=True):
            name = param.name
            copy = self._copies.fresh(name)
            # Of another memory is what torch.func.functional_call has put in a parameter's place.
            if not tile_of(param, shard).numel() or shard.data_ptr() != at.offloaded.get(name):
                found[name] = shard
                if host is not None and host.holds(shard):
                    found[name] = shard.detach()  # nothing was planned yet
                    on_host.add(name)
            elif copy is not None and copy.tensor is not None:
                copy.arrive()
                found[name] = copy.tensor
            elif copy is not None and copy.cast is not None:
                found[name] = copy.cast
                on_host.add(name)
            elif name in at.on_host:
                found[name] = shard.detach()
                on_host.add(name)
            else:
                block = at.blocks[name]
                stored = (at.parameters[block], block.dtype)
                extent, dtype = stored if copy is None else (at.copied[block], copy.dtype)
                if isinstance(param, ParamTile):
                    found[name] = self._read_tile(extent, block, dtype, param, fetch)
                else:
                    reads.setdefault(extent, (block, dtype, []))[2].append(name)
                if host is not None:
                    on_host.add(name)
                continue
            found[name] = tile_of(param, found[name])
        for extent, (block, dtype, names) in reads.items():
            for run in block.reads(names):
                found |= self._read(extent, block, dtype, run, fetch)
        fetch.shards = [found[p.name] for p in params]
        fetch.on_host = [place for place, p in enumerate(params) if p.name in on_host]
        return fetch

    def copy_up(self, fetch: Fetch) -> Fetch:
        """Begin to copy to the device what of ``fetch`` is on the host, or will be."""
        if fetch.on_host:
            reads, fetch.under_way = fetch.under_way, []
            sources = {place: fetch.shards[place] for place in fetch.on_host}
            arrived = partial(self._wait_for, reads) if reads else None
            targets = self._locations.hosted.fetch(sources, arrived, fetch.copies, fetch.whose)
            fetch.shards = [targets.get(place, shard) for place, shard in enumerate(fetch.shards)]
            fetch.on_host = []
        return fetch

    def _wait_for(self, reads: Sequence[Ticket]) -> None:
        for ticket in reads:
            self._room.arena.wait(ticket)

    def finish(self, fetch: Fetch) -> list[Tensor]:
        """The shards, in the dtype that they live in.

        Raises:
            StorageError: a transfer failed.
        """
        self._wait_for(fetch.under_way)
        while fetch.copies:
            fetch.copies.pop().wait()
        return fetch.shards

    def _read(self, extent: Extent, block: Block, dtype: torch.dtype, run: ShardRun, fetch: Fetch) -> dict[str, Tensor]:
        memory = self._take((run.end - run.begin) * dtype.itemsize).view(dtype)
        fetch.under_way.append(self._begin(extent, block, memory, run.begin))
        if extent is self._locations.parameters[block] and block not in self._locations.divided:
            fetch.runs.append(FetchedRun(block, run.begin, memory, fetch.under_way[-1]))
        found = {}
        for name in run.names:
            like = self._locations.local(name)
            part = memory[block.begins[name] - run.begin : block.ends[name] - run.begin]
            found[name] = part.as_strided(like.shape, like.stride(), part.storage_offset())
        return found

    def _read_tile(self, extent: Extent, block: Block, dtype: torch.dtype, tile: ParamTile, fetch: Fetch) -> Tensor:
        like = self._locations.local(tile.name)
        if not like.is_contiguous():  # its rows lie all over it
            (run,) = block.reads({tile.name})
            return tile_of(tile, self._read(extent, block, dtype, run, fetch)[tile.name])
        rows = tile_of(tile, like)
        first = block.begins[tile.name] + tile.begin * like.stride(0)
        begin, end = first // UNIT * UNIT, -(-(first + rows.numel()) // UNIT) * UNIT
        memory = self._take((end - begin) * dtype.itemsize).view(dtype)
        fetch.under_way.append(self._begin(extent, block, memory, begin))
        return memory[first - begin :][: rows.numel()].view(rows.shape)

    def _take(self, size: int) -> Tensor:
        host = self._locations.host
        return host.memory.stage(size) if host is not None else self._buffers.take(size)

    def _begin(self, extent: Extent, block: Block, memory: Tensor, begin: int) -> Ticket:
        """Begin to read what ``extent`` has of ``block``, from the element ``begin`` on."""
        offset = begin * memory.itemsize
        return self._room.arena.read(extent, memory, Priority.now, offset=offset, purpose=block.purpose("shard"))

    @property
    def bytes(self) -> int:
        """Bytes of the buffers that shards are read into."""
        return self._buffers.bytes
