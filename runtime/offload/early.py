"""Parameters that were filled on NVMe before anything was planned, until they move to their buckets or into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.locations import Locations
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.store import mapped_tensor
from zerograph.runtime.torch_private import local_tensor, set_local


class EarlyParameters:
    """Extents of their own, one for each."""

    def __init__(self, room: ArenaRoom, locations: Locations, reclaim: Callable[[], None]) -> None:
        """``reclaim`` frees extents that nobody maps."""
        self._room, self._locations, self._reclaim = room, locations, reclaim
        self._extents: dict[int, Extent] = {}  # by the address of its mapping

    def make(self, like: Tensor) -> Tensor:
        """Memory on NVMe for a shard as ``like``."""
        extent = self._room.allocate(like.nbytes, "a parameter that is materialized")
        flat = mapped_tensor(self._room.arena, extent, like.dtype, (like.numel(),))
        self._extents[flat.data_ptr()] = extent
        return flat.as_strided(like.shape, like.stride())

    def drop_pages(self, tensor: Tensor) -> None:
        """Keep nothing of what :meth:`make` gave in this process's memory."""
        extent = self.extent(tensor)
        if extent is not None:
            self._room.arena.map(extent).drop(0, tensor.nbytes)

    def extent(self, local: Tensor) -> Extent | None:
        """Where ``local`` lies; None if :meth:`make` did not give it."""
        return self._extents.get(local.data_ptr())

    def leave(self, local: Tensor) -> bool:
        """Whether ``local`` was one of them, whose room is free when nobody maps it."""
        extent = self._extents.pop(local.data_ptr(), None)
        if extent is not None:
            self._room.loose.add(extent)
        return extent is not None

    def bring_back(self, names: Iterable[str], moved: Callable[[Tensor], None]) -> None:
        """Put those of the parameters ``names`` into memory that stay; ``moved`` hears of each."""
        for name in names if self._extents else ():
            param, local = self._locations.params[name], self._locations.local(name)
            if self.leave(local):
                set_local(param, local.detach().clone())
                moved(param)

    def forget(self) -> None:
        """Give back the room of those that are no parameters now: something failed before they were."""
        live = {local_tensor(param).data_ptr() for param in self._locations.params.values()}
        self._room.loose.update(self._extents.pop(address) for address in [*self._extents] if address not in live)
        if self._room.opened is not None:
            self._reclaim()
