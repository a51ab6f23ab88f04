"""Gradients on NVMe: written as a backward makes them, and added to there by the next one.

Autograd is given a mapping of the extent, and keeps it as ``.grad``. A gradient that the user kept, in whatever tensor,
is never written over: the next one then gets another extent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as finished
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import zerograph._core as _core
from zerograph.core.errors import StorageError
from zerograph.core.plan import ParamTile
from zerograph.core.slots import SLOTS
from zerograph.runtime.offload.blocks import UNIT, Block, ShardRun
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.locations import Locations
from zerograph.runtime.offload.nvme import Arena, Ticket, huge_tensor
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.store import mapped_tensor
from zerograph.runtime.torch_private import (
    Memory,
    accumulated_directly,
    gradient_goes,
    has_gradient_hooks,
    local_tensor,
)

PIECE = 2**16
"""Elements that ``_core.squares`` sums together, counted from a tensor's beginning."""


class _Given(NamedTuple):
    """The mapping that autograd was given as the gradient of a parameter."""

    block: Block
    extent: Extent
    address: int
    memory: Memory


class SpilledGradients:
    """The gradients of one store."""

    def __init__(self, room: ArenaRoom, locations: Locations, slots: Callable[[], list[Tensor]]) -> None:
        """``slots`` gives as many as there are in a ring, registered, when nothing else uses them."""
        self._room, self._locations, self._slots = room, locations, slots
        self._params, self._ring = locations.params, list[Tensor]()
        self._extents: dict[Block, Extent] = {}  # where new gradients are written
        self._left: list[Extent] = []  # where others are, which the user kept
        self._given: dict[str, _Given] = {}
        self._names: dict[int, str] = {}  # by address of what was given
        self._in_tiles: dict[str, tuple[Extent, bool]] = {}  # where tiles of a gradient go, and whether they are added
        self._under_way: list[Ticket | None] = [None] * SLOTS
        self._turn = 0
        self._sums: dict[str, list[float]] | None = None  # of gradients as they left; None until somebody asks
        self._stamp: list[int] = []  # when the files were last written to, at the end of the last spill
        self._begun: list[Future[None]] = []

    @property
    def _arena(self) -> Arena:
        return self._room.arena

    @property
    def is_used(self) -> bool:
        """Whether gradients go to NVMe."""
        return bool(self._given)

    def spill(self, block: Block, grads: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Begin to write gradients of parameters of ``block``; they are free to go.

        Returns:
            The tensors for autograd by name: a mapping, or None where the gradient was added to the parameter's
            ``.grad`` there.

        Raises:
            StorageError: there is no room, or a transfer failed.
        """
        self._ring = self._slots()
        adds = self._adds(grads)
        fresh = [name for name in grads if name not in adds]
        if fresh:
            self._make_room(block, fresh)
        for into in dict.fromkeys(self._given[name].extent for name in adds):
            for run in block.runs([name for name in adds if self._given[name].extent is into]):
                self._begin(partial(self._move, block, into, run, block.begins, grads, add=True))
        for run in block.runs(fresh):
            self._begin(partial(self._move, block, self._extents[block], run, block.begins, grads, add=False))
        if self._sums is not None and self._locations.host is None:
            self._sums |= {name: _squares(self._flat(name, grads[name])) for name in fresh}
        return {name: None if name in adds else self._give(block, name) for name in grads}

    def spill_tile(self, block: Block, tile: ParamTile, grad: Tensor) -> Tensor | None:
        """Begin to write the rows of ``tile``, of which the first comes first, of the gradient of a parameter whose
        shard has its rows one behind another; ``grad`` is free to go.

        Returns:
            The tensor for autograd with the first tile, as :meth:`spill`; else None.
        """
        self._ring, name, given = self._slots(), tile.name, None
        if tile.begin == 0:
            adds = bool(self._adds([name]))
            if not adds:
                self._make_room(block, [name])
                given = self._give(block, name)
            self._in_tiles[name] = self._given[name].extent, adds
        extent, adds = self._in_tiles[name]
        before = tile.begin * math.prod(grad.shape[1:])
        if self._sums is not None and self._locations.host is None and not adds:
            sums = self._sums.pop(name, None) if before else []
            if sums is not None and before % PIECE == 0:
                self._sums[name] = sums + _squares(self._flat(name, grad))
        begin = block.begins[name] + before
        run = ShardRun(begin, begin + grad.numel(), (name,))
        self._begin(partial(self._move, block, extent, run, {name: begin}, {name: grad}, add=adds))
        return given

    def _adds(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` whose new gradient is added to the last one there."""
        if self._sums is not None:
            for name in names:
                self._sums.pop(name, None)
        adds = [name for name in names if self._is_here(name)]
        if not adds:
            return adds
        direct = accumulated_directly()
        return [name for name in adds if id(p := self._params[name]) in direct and gradient_goes(p, direct) == "added"]

    def _make_room(self, block: Block, names: Sequence[str]) -> None:
        """Let the extent of ``block`` be one that new gradients of ``names`` may be written to."""
        extent = self._extents.get(block)
        if extent is not None and any(self._is_held(name, extent) for name in names):
            self._left.append(self._extents.pop(block))
            extent = None
        if extent is None:
            self._extents[block] = self._made(block)

    def squares(self, address: int) -> list[float] | None:
        """Sums of squares of the gradient at ``address``, as ``_core.squares`` has them; None where none is here.

        Once they have been asked for they are taken as gradients leave, and again only of those that may have been
        touched since: much that writes to gradients counts in no version (``GradScaler.unscale_``, ``.data``, and of
        DTensors what changes their parts), but all of it goes through mappings.
        """
        name = self._names.get(address, "")
        given, grad = self._given.get(name), self._params[name].grad if name else None
        if given is None or grad is None or local_tensor(grad).data_ptr() != given.address or not given.memory:
            return None
        self._ring = self._slots()
        self.wait()
        if self._sums is None:
            self._sums = {}
        known = self._sums.get(name)
        if known is None or self._is_touched(name, given):
            known = self._summed(given.block, name, given.extent)
        return known

    def _is_touched(self, name: str, given: _Given) -> bool:
        # Pages that were touched may be gone again, but then the files are newer. These tick in milliseconds, in which
        # no page goes.
        if self._stamp != self._arena.modified():
            return True
        block, size = given.block, given.block.dtype.itemsize
        begin, end = block.begins[name] * size, block.ends[name] * size
        return self._arena.is_touched(given.extent, begin, end - begin)

    def _summed(self, block: Block, name: str, extent: Extent) -> list[float]:
        found, size = list[float](), block.dtype.itemsize
        memory = self._ring[0] if self._ring[0].nbytes >= PIECE * size else huge_tensor(PIECE * size)
        memory = memory[: memory.nbytes // (PIECE * size) * PIECE * size].view(block.dtype)
        for begin in range(block.begins[name], block.ends[name], len(memory)):
            part = memory[: block.ends[name] - begin]
            self._arena.wait(self._arena.read(extent, part, offset=begin * size))
            found += _squares(part)
        return found

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            StorageError: a transfer failed.
        """
        while self._begun:
            self._begun.pop(0).result()
        self._written()

    def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        finished(self._begun)
        self._begun.clear()
        for turn in range(SLOTS):
            with contextlib.suppress(StorageError):  # the first error is on its way to the caller
                self._wait_for(turn)

    def extent_of(self, block: Block) -> tuple[Extent, int] | None:
        """Where the gradients of ``block`` are that were written last, and the address of their mapping; None where
        nobody holds any."""
        extent = self._extents.get(block)
        if extent is None or not self._arena.is_mapped(extent):
            return None
        return extent, int(self._arena.map(extent).address)

    @property
    def bytes(self) -> int:
        """On NVMe."""
        return sum(extent.bytes for extent in (*self._extents.values(), *self._left))

    def reclaim(self, *, all_of_them: bool = False) -> None:
        """Free the extents of gradients that nobody keeps; where the next are written to only if ``all_of_them``."""
        if all_of_them:
            self.wait()
            gone = [block for block, extent in self._extents.items() if not self._arena.is_mapped(extent)]
            self._left += [self._extents.pop(block) for block in gone]
        for extent in [e for e in self._left if not self._arena.is_mapped(e)]:
            self._left.remove(extent)
            self._arena.free(extent)

    def _made(self, block: Block) -> Extent:
        self.reclaim()
        return self._room.extent(block, block.dtype, "gradients")

    def _is_held(self, name: str, extent: Extent) -> bool:
        """Whether something still shows a gradient of ``name`` in ``extent``."""
        given = self._given.get(name)
        return given is not None and given.extent is extent and bool(given.memory)

    def _is_here(self, name: str) -> bool:
        """Whether the ``.grad`` of a parameter is what autograd was given, and the next gradient may be added to it."""
        given, param = self._given.get(name), self._params[name]
        if given is None or not given.memory or param.grad is None:
            return False
        # A hook is to see each gradient: autograd then adds, through the mappings.
        return local_tensor(param.grad).data_ptr() == given.address and not has_gradient_hooks(param)

    def _give(self, block: Block, name: str) -> Tensor:
        like, extent = local_tensor(self._params[name]), self._extents[block]
        offset = block.begins[name] * block.dtype.itemsize
        flat = mapped_tensor(self._arena, extent, block.dtype, (like.numel(),), offset)
        self._given[name] = _Given(block, extent, flat.data_ptr(), Memory(flat))
        self._names[flat.data_ptr()] = name
        return flat.as_strided(like.shape, like.stride())

    def _begin(self, move: Callable[[], None]) -> None:
        """Where gradients come from another memory, what writes them waits for the thread that copies them here."""
        host = self._locations.host
        if host is None:
            move()
        else:
            # Each holds its gradients in memory of the host: a disk that is slower than the backward is waited for.
            while len(self._begun) >= SLOTS:
                self._begun.pop(0).result()
            self._begun.append(host.memory.after_copies(move))

    def _move(
        self,
        block: Block,
        extent: Extent,
        run: ShardRun,
        begins: Mapping[str, int],
        grads: Mapping[str, Tensor],
        *,
        add: bool,
    ) -> None:
        """Write the gradients of ``run``, which have their first elements at ``begins``, or add them to what is there,
        a slot at a time."""
        flat = {name: self._flat(name, grads[name]) for name in run.names}
        ragged = run.begin % UNIT or run.end % UNIT
        if ragged:
            self._written()  # also what else writes to the same block of the disk
        most, purpose = len(self._ring[0].view(block.dtype)), block.purpose("gradient")
        for begin in range(run.begin, run.end, most):
            end, offset = min(begin + most, run.end), begin * block.dtype.itemsize
            self._wait_for(self._turn)
            chunk = self._ring[self._turn].view(block.dtype)[: end - begin]
            if add:
                self._arena.wait(self._arena.read(extent, chunk, offset=offset, purpose=purpose))
            for name, grad in flat.items():
                first, last = max(begin, begins[name]), min(end, begins[name] + len(grad))
                if first < last:
                    part = grad[first - begins[name] : last - begins[name]]
                    into = chunk[first - begin : last - begin]
                    into.add_(part) if add else into.copy_(part)
            self._under_way[self._turn] = self._arena.write(extent, chunk, offset=offset, purpose=purpose)
            self._turn = (self._turn + 1) % SLOTS
        if ragged:
            self._written()

    def _flat(self, name: str, grad: Tensor) -> Tensor:
        """The elements of a gradient, or of a tile of it, in the order in which those of its parameter lie."""
        like = local_tensor(self._params[name])
        if grad.stride() != like.stride():
            grad = torch.empty_strided(grad.shape, like.stride(), dtype=grad.dtype, device="cpu").copy_(grad)
        return grad.as_strided((grad.numel(),), (1,))

    def _written(self) -> None:
        wrote = any(self._under_way)
        for turn in range(SLOTS):
            self._wait_for(turn)
        if wrote:
            self._stamp = self._arena.modified()

    def _wait_for(self, turn: int) -> None:
        ticket, self._under_way[turn] = self._under_way[turn], None
        if ticket is not None:
            self._arena.wait(ticket)


def _squares(flat: Tensor) -> list[float]:
    tag = getattr(_core.DType, str(flat.dtype).removeprefix("torch."))
    return _core.squares([(flat.data_ptr(), tag, flat.numel())]) if flat.numel() else []
