"""What of a backend's parameters is in the host's memory: shards that programs fetch, copies on the device that follow
them, and gradients that a backward spills."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime.buffers import aligned, torch_dtype
from zerograph.runtime.host import HostMemory, Transfer
from zerograph.runtime.torch_private import local_tensor, memory_is_unshared, versions

SLOTS = 3
"""Parameters whose casts are on their way up at most, before the host makes more."""

LEAVING = 2
"""Buckets of gradients on their way at most: the device waits before it makes more, so that their memory is bounded."""


@dataclass(slots=True)
class Copy:
    """What is gathered in place of a parameter that left the device.

    Attributes:
        tensor: its values in the compute dtype, on the device; None where they are brought there for each gather.
        dtype: the compute dtype.
        seen: the parameter's versions when it had these values; None once something has stepped on it that versions do
            not show.
        cast: the values on the host, beside a parameter there of another dtype: what is brought to the device.
        under_way: what brings ``tensor`` its values of now.
    """

    tensor: Tensor | None
    dtype: torch.dtype
    seen: tuple[int, int] | None
    cast: Tensor | None = None
    under_way: Transfer | None = None

    def land(self) -> None:
        """Let ``tensor`` have its values."""
        if self.under_way is not None:
            self.under_way.wait()  # if that raises, as Ctrl-C does, nobody takes the copy for whole
            self.under_way = None


class HostShards:
    """What one store has there, and moves between there and the device."""

    def __init__(self, params: Mapping[str, Tensor], memory: HostMemory) -> None:
        """``params`` are the outward parameters by name."""
        self._params, self._memory = params, memory
        self._leaving: deque[Transfer] = deque()  # gradients
        self._rising: list[Transfer] = []  # parameters
        self._slots: deque[tuple[Tensor, Transfer]] = deque()  # masters in the compute dtype
        self._arrived: dict[tuple[str, ...], Tensor] = {}  # by whose they are, memory of the last gradients

    def is_home(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the host, where that can be seen: on a split machine all is in one memory."""
        return tensor.device.type != self._memory.device.type

    def copy_of(self, described: Param, *, away: bool) -> Copy | None:
        """What is gathered of a parameter that is on the host from now on: on the device, or if its shards are to be
        ``away`` from there, beside it; None where that is the parameter itself."""
        param, dtype = self._params[described.name], torch_dtype(described.compute_dtype)
        local = local_tensor(param).detach()
        if not away:
            return Copy(local.to(self._memory.device, dtype, copy=True), dtype, versions(param))
        if not described.is_master:
            return None
        cast = home_for(torch.empty_like(local, dtype=dtype, device="meta"), self._memory).copy_(local)
        return Copy(None, dtype, versions(param), cast)

    def upload(self, names: Mapping[str, Copy]) -> None:
        """Begin to bring copies on the device the values that their parameters have on the host."""
        for name, copy in names.items():
            if copy.tensor is None:
                continue
            copy.land()
            # A lone rank's gather is the copy itself: somebody may still look at it.
            if not memory_is_unshared(copy.tensor):
                copy.tensor = torch.empty_like(copy.tensor)
            source, room = local_tensor(self._params[name]).detach(), None
            if source.dtype != copy.dtype:
                room = self._slot(copy.tensor.nbytes)
                (cast,) = _laid_out(room, [copy.tensor])
                source = cast.copy_(source)  # by the host: fewer bytes go up
            copy.under_way = self._memory.start([(source, copy.tensor)])
            self._rising.append(copy.under_way)
            if room is not None:
                self._slots.append((room, copy.under_way))

    def _slot(self, size: int) -> Tensor:
        """Memory for what is on its way up, used in turn."""
        if len(self._slots) < SLOTS:
            return self._memory.room(size)
        room, under_way = self._slots.popleft()
        under_way.arrive()
        return room if len(room) >= size else self._memory.room(size)

    def fetch(self, sources: Mapping[str, Tensor], under_way: list[Transfer]) -> dict[str, Tensor]:
        """Begin to copy shards to memory on the device."""
        room = self._memory.above(sum(aligned(source.nbytes) for source in sources.values()))
        found = dict(zip(sources, _laid_out(room, sources.values()), strict=True))
        under_way.append(self._memory.start([(sources[name], target) for name, target in found.items()]))
        self._rising.append(under_way[-1])
        return found

    def wait_for_parameters(self) -> None:
        """Return when nothing of the host's is read any more: its owner may write to it."""
        while self._rising:
            self._rising.pop().arrive()

    def spill(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy gradients to the host; returns what autograd gets in their places."""
        key, size = tuple(grads), sum(aligned(grad.nbytes) for grad in grads.values())
        room = self._arrived.get(key)
        # What is still a gradient, or is kept by the user in whatever tensor, is never written over.
        if room is None or len(room) != size or not memory_is_unshared(room):
            room = self._arrived[key] = self._memory.room(size)
        # Laid out as their parameters are: gradients may be slices of something, or expanded.
        likes = [
            torch.empty_like(local_tensor(self._params[name]), dtype=g.dtype, device="meta")
            for name, g in grads.items()
        ]
        homes = list(_laid_out(room, likes))
        while len(self._leaving) >= LEAVING:
            self._leaving.popleft().wait()
        self._leaving.append(self._memory.start(list(zip(grads.values(), homes, strict=True))))
        # With a version of its own: autograd adds to each.
        return {name: home.data for name, home in zip(grads, homes, strict=True)}

    def wait_for_gradients(self) -> None:
        """Return when all are here: transfers end in the order in which they begin."""
        while self._leaving:
            self._leaving.popleft().arrive()

    @property
    def gradients(self) -> int:
        """Bytes that hold the last gradients, or the next."""
        return sum(len(room) for room in self._arrived.values())

    @property
    def slots(self) -> int:
        """Bytes that casts pass through on their way up."""
        return sum(len(room) for room, _ in self._slots)

    def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for transfers in (self._leaving, self._rising):
            while transfers:
                with contextlib.suppress(Exception):
                    transfers.pop().arrive()


def home_for(like: Tensor, host: HostMemory) -> Tensor:
    """Memory on the host for a dense tensor as ``like``."""
    (home,) = _laid_out(host.room(like.nbytes), [like])
    return home


def _laid_out(room: Tensor, likes: Iterable[Tensor]) -> Iterator[Tensor]:
    """Dense tensors as ``likes``, one behind another in ``room``."""
    place = 0
    for like in likes:
        yield room[place : place + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        place += aligned(like.nbytes)
