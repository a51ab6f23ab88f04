"""The room of a backend on NVMe, opened once and handed out in extents."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from zerograph.core.errors import StorageError
from zerograph.core.units import format_bytes
from zerograph.runtime.offload.blocks import Block
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.nvme import Arena

log = logging.getLogger(__name__)


class ArenaRoom:
    """The arena, and those of its extents that are given back by themselves.

    Attributes:
        loose: extents that are free when nobody maps them and no optimizer holds them.
    """

    def __init__(self, open_arena: Callable[[int], Arena | None], reclaim: Callable[[], None]) -> None:
        """``open_arena`` makes room for so many bytes, None where there may be no more; ``reclaim`` frees extents that
        nobody needs."""
        self.open, self._reclaim = open_arena, reclaim
        self.opened: Arena | None = None
        self._enough: Callable[[], int]
        self.loose: set[Extent] = set()

    @property
    def arena(self) -> Arena:
        """The arena, where something is on NVMe."""
        assert self.opened is not None
        return self.opened

    def reserve(self, size: int, enough: Callable[[], int] = lambda: 0) -> Arena:
        """Open the arena with ``size`` bytes; ``enough`` says how many are, whatever trains or is kept later.

        Raises:
            StorageError: there is no room.
        """
        self.opened, self._enough = self.open(size), enough
        log.info("room on NVMe: %s", format_bytes(self.arena.size))
        return self.arena

    def extent(self, block: Block, dtype: torch.dtype, what: str) -> Extent:
        """An extent for ``what`` of all parameters of ``block``, in ``dtype``; see :meth:`allocate`."""
        return self.allocate(block.elements * dtype.itemsize, f"{what} of bucket {block.name}")

    def allocate(self, size: int, what: str) -> Extent:
        """An extent of ``size`` bytes for ``what``, as people call it.

        Raises:
            StorageError: there is no room.
        """
        if self.arena.free_bytes < size:
            self._reclaim()
        try:
            return self.arena.allocate(size)
        except StorageError as error:
            enough = max(self._enough(), self.arena.size + size)
            raise StorageError(
                f"{str(error).partition(chr(10))[0]}; they are for {what}",
                "give the backend room for parameters that train only later, and states that an optimizer adds: "
                f"zerograph.backend(nvme='{-(-enough // 2**20)}MiB')",
            ) from None
