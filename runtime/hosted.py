"""What of a backend's parameters is in the host's memory beside a device's: shards that programs fetch, copies on the
device that follow them, gradients that a backward spills, and what passes there on its way to and from NVMe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from zerograph.core.plan import Homes, Param
from zerograph.runtime.buffers import BufferPool, aligned, torch_dtype
from zerograph.runtime.host import HostMemory
from zerograph.runtime.torch_private import local_tensor, memory_is_unshared, versions

K = TypeVar("K")


@dataclass(slots=True)
class Copy:
    """What is gathered in place of a parameter that left the device.

    Attributes:
        tensor: its values in the compute dtype, on the device; None where they are brought there for each gather.
        dtype: the compute dtype.
        seen: the parameter's versions when it had these values; None once something has stepped on it that versions do
            not show.
        cast: the values on the host, where the parameter has another dtype, or is on NVMe: what is brought to the
            device.
        under_way: what brings ``tensor`` its values of now.
    """

    tensor: Tensor | None
    dtype: torch.dtype
    seen: tuple[int, int] | None
    cast: Tensor | None = None
    under_way: Future[None] | None = None

    def land(self) -> None:
        """Let ``tensor`` have its values."""
        if self.under_way is not None:
            self.under_way.result()  # if that raises, as Ctrl-C does, nobody takes the copy for whole
            self.under_way = None

    def renew(self) -> None:
        """Let ``tensor`` be memory that may be written over: a lone rank's gather is the copy itself, and somebody may
        still look at it."""
        if self.tensor is not None:
            self.land()
            if not memory_is_unshared(self.tensor):
                self.tensor = torch.empty_like(self.tensor)


class HostShards:
    """What one store has there, and moves between there and the device.

    Attributes:
        memory: makes the copies.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """``params`` are the outward parameters by name."""
        self._params, self.memory = params, HostMemory()
        self._fetched, self._staged = BufferPool(_memory), BufferPool(_memory)
        self._arriving: list[Future[None]] = []  # gradients
        self._arrived: dict[tuple[str, ...], Tensor] = {}  # by whose they are, memory of the last gradients

    def copy_of(self, described: Param, homes: Homes) -> Copy | None:
        """What is gathered of a parameter that is off the device from now on, of values that are now in memory: on the
        device or on the host; None where that is the parameter itself."""
        param, dtype = self._params[described.name], torch_dtype(described.compute_dtype)
        local = local_tensor(param).detach()  # on a split machine it is on the host already
        if homes.parameters == "device":
            return Copy(local.to(dtype, copy=True), dtype, versions(param))
        # What is not trained is not updated, and so lives where it is gathered from.
        apart = described.trainable and homes.parameters != homes.optimizer
        return Copy(None, dtype, versions(param), local.to(dtype, copy=True)) if apart or described.is_master else None

    def upload(self, name: str, copy: Copy) -> None:
        """Begin to bring a copy on the device the values that its parameter has off it."""
        copy.renew()
        if copy.tensor is not None:
            copy.under_way = self.memory.start(local_tensor(self._params[name]).detach(), copy.tensor)

    def fetch(
        self, sources: Mapping[K, Tensor], arrived: Callable[[], None], under_way: list[Future[None]]
    ) -> dict[K, Tensor]:
        """Begin to copy shards to memory on the device, which are on the host when ``arrived`` returns."""
        room, found = self._fetched.take(sum(aligned(source.nbytes) for source in sources.values())), {}
        for (key, source), target in zip(sources.items(), _laid_out(room, sources.values()), strict=True):
            found[key] = target
            under_way.append(self.memory.start(source, target, arrived))
        return found

    def spill(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy gradients to the host, where they stay; returns what autograd gets in their places."""
        key, size = tuple(grads), _bytes(grads)
        room = self._arrived.get(key)
        # What is still a gradient, or is kept by the user in whatever tensor, is never written over.
        if room is None or len(room) != size or not memory_is_unshared(room):
            room = self._arrived[key] = _memory(size)
        # With versions of their own: autograd adds to each.
        return {name: home.data for name, home in self._down(grads, room).items()}

    def stage(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy gradients to the host, from where they are written."""
        return self._down(grads, self._staged.take(_bytes(grads)))

    def _down(self, grads: Mapping[str, Tensor], room: Tensor) -> dict[str, Tensor]:
        # Laid out as their parameters are: gradients may be slices of something, or expanded.
        likes = [
            torch.empty_like(local_tensor(self._params[name]), dtype=g.dtype, device="meta")
            for name, g in grads.items()
        ]
        found = dict(zip(grads, _laid_out(room, likes), strict=True))
        self._arriving += [self.memory.start(grad, found[name]) for name, grad in grads.items()]
        return found

    def wait_for_gradients(self) -> None:
        """Return when all are here."""
        while self._arriving:
            self._arriving.pop().result()

    def arrival(self) -> Callable[[], None]:
        """What waits for those that are on their way now."""
        arriving = list(self._arriving)

        def arrive() -> None:
            for copy in arriving:
                copy.result()

        return arrive

    def abandon(self) -> None:
        """Wait for gradients under way, whatever becomes of them."""
        wait(self._arriving)
        self._arriving.clear()


@torch.inference_mode(False)  # an evaluation's memory serves training afterwards
def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _bytes(grads: Mapping[str, Tensor]) -> int:
    return sum(aligned(grad.nbytes) for grad in grads.values())


def _laid_out(room: Tensor, likes: Iterable[Tensor]) -> Iterator[Tensor]:
    """Dense tensors as ``likes``, one behind another in ``room``."""
    place = 0
    for like in likes:
        yield room[place : place + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        place += aligned(like.nbytes)
