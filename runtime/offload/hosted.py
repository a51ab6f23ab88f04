"""The part of a backend's parameters in the host's memory beside a device's: shards that programs fetch, copies on the
device that follow them, gradients that a backward spills, and bytes on their way to and from NVMe."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from zerograph.core.placement import copy_tier
from zerograph.core.plan import Param, ParamTile, Placement
from zerograph.core.slots import LEAVING, SLOTS
from zerograph.runtime.buffers import aligned, tile_of, torch_dtype
from zerograph.runtime.offload.host import HostMemory, Pairs, Transfer
from zerograph.runtime.timings import Purpose
from zerograph.runtime.torch_private import local_tensor, memory_is_unshared, versions

K = TypeVar("K")


@dataclass(slots=True)
class Copy:
    """The copy that is gathered in place of a parameter that left the device.

    Attributes:
        tensor: its values in the compute dtype, on the device; None where they are brought there for each gather.
        dtype: the compute dtype.
        seen: the parameter's versions when it had these values; None once something has stepped on it that versions do
            not show.
        cast: the values on the host, where the parameter has another dtype, or is on NVMe: what is brought to the
            device.
        under_way: what brings ``tensor`` its values of now.
        is_late: an update on the host does not write ``cast``, as programs may compute meanwhile.
        late: the values of an update that is under way, in memory where it writes: programs compute meanwhile with
            those before it.
    """

    tensor: Tensor | None
    dtype: torch.dtype
    seen: tuple[int, int] | None
    cast: Tensor | None = None
    under_way: Transfer | None = None
    is_late: bool = False
    late: Tensor | None = None

    def arrive(self) -> None:
        """Let ``tensor`` have its values."""
        if self.under_way is not None:
            self.under_way.wait()  # if that raises, as Ctrl-C does, nobody takes the copy for whole
            self.under_way = None

    def renew(self) -> None:
        """Let ``tensor`` be memory that may be written over: a lone rank's gather is the copy itself, and somebody may
        still look at it."""
        if self.tensor is not None:
            self.arrive()
            if not memory_is_unshared(self.tensor):
                self.tensor = torch.empty_like(self.tensor)


class HostShards:
    """The tensors of one store on the host, and their transfers to and from the device.

    Attributes:
        memory: makes the copies.
    """

    def __init__(self, params: Mapping[str, Tensor], memory: HostMemory) -> None:
        """``params`` are the outward parameters by name."""
        self._params, self.memory = params, memory
        self._leaving: deque[Transfer] = deque()  # gradients
        self._rising: list[Transfer] = []  # parameters
        self._slots: deque[tuple[Tensor, Transfer]] = deque()  # masters in the compute dtype
        self._arrived: dict[tuple[str, ...], list[Tensor]] = {}  # by whose they are, memory of the last gradients

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the host, where that can be seen: on a split machine all is in one memory."""
        return tensor.device.type != self.memory.device.type

    def copy_of(self, described: Param, placement: Placement) -> Copy | None:
        """The copy to gather in place of a parameter that is off the device from now on, of values that are now in
        memory: on the device or on the host; None where the parameter itself is gathered."""
        param, dtype = self._params[described.name], torch_dtype(described.compute_dtype)
        local, tier = local_tensor(param).detach(), copy_tier(described, placement, split=True)
        if tier is None:
            return None
        if tier == "device":
            return Copy(local.to(self.memory.device, dtype, copy=True), dtype, versions(param))
        cast = host_like(torch.empty_like(local, dtype=dtype, device="meta"), self.memory).copy_(local)
        return Copy(None, dtype, versions(param), cast)

    def upload(self, names: Mapping[str, Copy]) -> None:
        """Begin to bring copies on the device the values that their parameters have off it."""
        for name, copy in names.items():
            if copy.tensor is None:
                continue
            source, room = local_tensor(self._params[name]).detach(), None
            if source.dtype != copy.dtype:
                room = self._slot(copy.tensor.nbytes)
                (cast,) = _laid_out(room, [copy.tensor])
                source = cast.copy_(source)  # by the host: fewer bytes go up
            under_way = self.bring(name, copy, source)
            if room is not None:
                self._slots.append((room, under_way))

    def bring(self, name: str, copy: Copy, values: Tensor) -> Transfer:
        """Begin to bring the ``copy`` of a parameter, which is on the device, its ``values`` from the host."""
        copy.renew()
        assert copy.tensor is not None
        copy.under_way = self.memory.start("h2d", [(values, copy.tensor)], purpose=Purpose("parameters", name))
        self._rising.append(copy.under_way)
        return copy.under_way

    def _slot(self, size: int) -> Tensor:
        """Memory for what is on its way up, used in turn."""
        if len(self._slots) < SLOTS:
            return self.memory.room(size)
        room, under_way = self._slots.popleft()
        under_way.arrive()
        return room if len(room) >= size else self.memory.room(size)

    def fetch(
        self, sources: Mapping[K, Tensor], arrived: Callable[[], None] | None, under_way: list[Transfer], whose: str
    ) -> dict[K, Tensor]:
        """Begin to copy shards to memory on the device, which are on the host when ``arrived`` returns, or are
        there. Recordings know the bucket by ``whose`` one of them is."""
        room = self.memory.above(sum(aligned(source.nbytes) for source in sources.values()))
        found = dict(zip(sources, _laid_out(room, sources.values()), strict=True))
        pairs = [(sources[key], target) for key, target in found.items()]
        under_way.append(self.memory.start("h2d", pairs, arrived, purpose=Purpose("shard", whose)))
        self._rising.append(under_way[-1])
        return found

    def wait_for_parameters(self) -> None:
        """Return when nothing of the host's is read any more: its owner may write to it."""
        while self._rising:
            self._rising.pop().arrive()

    def ascent(self) -> Callable[[], None]:
        """A function that waits, in any thread, until transfers now on their way to the device have read the host."""
        return _arriving(list(self._rising))

    def spill(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy gradients to the host, where they stay; returns what autograd gets in their places."""
        room = self._room(tuple(grads), _bytes(grads))
        found = dict(zip(grads, _laid_out(room, self._likes(grads)), strict=True))
        self._down(next(iter(grads), ""), [(grad, found[name]) for name, grad in grads.items()])
        # With versions of their own: autograd adds to each.
        return {name: placed.data for name, placed in found.items()}

    def spill_tile(self, tile: ParamTile, grad: Tensor, into: Tensor | None) -> Tensor:
        """Begin to copy the rows of a gradient that ``tile`` has, of which the first comes first; returns what autograd
        gets of the whole gradient, which is ``into`` from the second tile on."""
        if into is None:
            like = torch.empty_like(local_tensor(self._params[tile.name]), dtype=grad.dtype, device="meta")
            (placed,) = _laid_out(self._room((tile.name,), aligned(like.nbytes)), [like])
            into = placed.data
        self._down(tile.name, [(grad, tile_of(tile, into))])
        return into

    def _room(self, key: tuple[str, ...], size: int) -> Tensor:
        """Memory for the gradients of ``key``.

        Memory of a current gradient, or of any tensor that the user or an update keeps, is never written over. A
        delayed update takes two rooms in turn.
        """
        free, held = list[Tensor](), list[Tensor]()
        for room in self._arrived.get(key, ()):
            (free if memory_is_unshared(room) else held).append(room)
        fits = next((room for room in free if len(room) == size), None)
        room = fits if fits is not None else self.memory.room(size)
        self._arrived[key] = [*held, room]
        return room

    def stage(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy gradients, or tiles of them, to the host, from where they are written."""
        room = self.memory.stage(_bytes(grads))
        found = dict(zip(grads, _laid_out(room, self._likes(grads)), strict=True))
        self._down(next(iter(grads), ""), [(grad, found[name]) for name, grad in grads.items()])
        return found

    def _likes(self, grads: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """How ``grads`` or tiles of them lie on the host: as their parameters do. Here they may be slices of something,
        or expanded."""
        for name, grad in grads.items():
            like = local_tensor(self._params[name])
            like = like if like.shape == grad.shape else like[: len(grad)]
            yield torch.empty_like(like, dtype=grad.dtype, device="meta")

    def _down(self, whose: str, pairs: Pairs) -> None:
        while len(self._leaving) >= LEAVING:
            self._leaving.popleft().wait()
        self._leaving.append(self.memory.start("d2h", pairs, purpose=Purpose("gradient", whose)))

    def wait_for_gradients(self) -> None:
        """Return when all are here: transfers end in the order in which they begin."""
        while self._leaving:
            self._leaving.popleft().arrive()

    @property
    def gradients(self) -> int:
        """Bytes that hold the last gradients, or the next."""
        return sum(len(room) for rooms in self._arrived.values() for room in rooms)

    @property
    def slots(self) -> int:
        """Bytes that casts pass through on their way up."""
        return sum(len(room) for room, _ in self._slots)

    def arrival(self) -> Callable[[], None]:
        """A function that waits for the gradients that are on their way now."""
        return _arriving(list(self._leaving))

    def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for transfers in (self._leaving, self._rising):
            while transfers:
                with contextlib.suppress(Exception):
                    transfers.pop().arrive()


def host_like(like: Tensor, host: HostMemory) -> Tensor:
    """Memory on the host for a dense tensor as ``like``."""
    (placed,) = _laid_out(host.room(like.nbytes), [like])
    return placed


def _arriving(transfers: Sequence[Transfer]) -> Callable[[], None]:
    def arrive() -> None:
        for transfer in transfers:
            transfer.arrive()

    return arrive


def _bytes(grads: Mapping[str, Tensor]) -> int:
    return sum(aligned(grad.nbytes) for grad in grads.values())


def _laid_out(room: Tensor, likes: Iterable[Tensor]) -> Iterator[Tensor]:
    """Dense tensors as ``likes``, one behind another in ``room``."""
    place = 0
    for like in likes:
        yield room[place : place + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        place += aligned(like.nbytes)
