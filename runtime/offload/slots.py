"""The slots that states pass through on their way between NVMe and an update, and the order of the updates that do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from zerograph.core.slots import ITEM, SLOT, SLOTS, slot_bytes
from zerograph.runtime.offload.background import Background
from zerograph.runtime.offload.blocks import UNIT
from zerograph.runtime.offload.locations import Locations
from zerograph.runtime.offload.nvme import huge_tensor
from zerograph.runtime.offload.room import ArenaRoom


class ReadsAhead(Protocol):
    """An update that streams states through the slots."""

    def read_ahead(self) -> None:
        """Begin to read what comes first into all slots but the last."""

    def updated(self, tensors: Sequence[Tensor]) -> None:
        """An update before this one has ended, which counts in the versions of ``tensors``."""

    def forget(self) -> None:
        """Leave the slots to others."""


class Slots:
    """A ring of buffers, a thread that works with it, and the update that reads ahead into it."""

    def __init__(self, room: ArenaRoom, locations: Locations, arrived: Callable[[], None]) -> None:
        """``arrived`` waits for the gradients that are on their way through the last slot."""
        self._room, self._locations, self._arrived = room, locations, arrived
        self._ring: list[Tensor] = []
        # Updates run in the same order in each step. What ran last, and what ran behind each:
        self._last_update: Callable[[], ReadsAhead | None] = lambda: None
        self._behind: weakref.WeakKeyDictionary[ReadsAhead, Callable[[], ReadsAhead | None]]
        self._behind = weakref.WeakKeyDictionary()
        self._ahead: ReadsAhead | None = None
        self._stamp: list[int] = []  # when files were last written to, at the end of a backward
        self._background = Background("zerograph-update")

    @property
    def ring(self) -> list[Tensor]:
        """The slots, made when they are first needed."""
        if not self._ring:
            # Before there are blocks, room for one as large as any may be.
            largest = max((block.elements for block in self._locations.blocks.values()), default=SLOT)
            size = max(slot_bytes(largest, SLOT), slot_bytes(UNIT))
            host = self._locations.host
            make = host.memory.stage if host is not None else huge_tensor
            self._ring = [make(size) for _ in range(SLOTS)]
            for slot in self._ring:
                self._room.arena.register(slot)
        return self._ring

    @property
    def of_gradients(self) -> list[Tensor]:
        """Parts of the last slot: while gradients leave, states are read ahead into the others."""
        *_, last = self.ring
        size = len(last) // SLOTS // (UNIT * ITEM) * UNIT * ITEM
        return [last[i * size : (i + 1) * size] for i in range(SLOTS)]

    def free(self) -> Tensor:
        """One of the ring, in which nothing is under way."""
        self._arrived()
        self.take()
        return self.ring[0]

    @property
    def bytes(self) -> int:
        """Bytes of all that there are by now."""
        return sum(slot.nbytes for slot in self._ring)

    def read_ahead(self) -> None:
        """A backward begins: what the update behind it needs first may come now."""
        if self._background.is_idle:
            self._read_behind(or_itself=True)

    def _read_behind(self, *, or_itself: bool = False) -> None:
        """Begin to read for what came behind the last update before; ``or_itself`` for that where there is no other."""
        last = self._last_update()
        alone = or_itself and not self._behind
        behind = self._behind.get(last, self._last_update if alone else None) if last is not None else None
        update = behind() if behind is not None else None
        if update is not None and self._ahead is None:
            self._ahead = update
            update.read_ahead()
            self.stamp()

    def stamp(self) -> None:
        """A backward is at its end: what is written from here on, the user writes."""
        if self._room.opened is not None and self._ahead is not None:
            self._stamp = self._room.opened.modified()

    @property
    def is_as_left(self) -> bool:
        """Whether nothing on NVMe was written since."""
        return self._room.opened is not None and self._stamp == self._room.opened.modified()

    def updated(self, tensors: Sequence[Tensor]) -> None:
        """An update has ended, which counts in the versions of ``tensors``."""
        if self._ahead is not None:
            self._ahead.updated(tensors)

    def has_run(self, update: ReadsAhead) -> None:
        """An update has streamed states through the slots."""
        last, self._last_update = self._last_update(), weakref.ref(update)
        if last is not None:
            self._behind[last] = weakref.ref(update)

    def take(self, update: ReadsAhead | None = None) -> None:
        """The slots are wanted, by ``update`` or somebody else, or what was read ahead may be old."""
        self.wait()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead is not update:
            ahead.forget()

    def wait(self) -> None:
        """Return when nothing works with them in the background."""
        self._background.wait()

    def in_background(self, work: Callable[[], None], *, more: bool = False) -> Future[None]:
        """Begin ``work``, which may use the slots, beside the caller: no other work uses them meanwhile. If ``more``
        will come soon, what it needs is read ahead behind it."""

        def works() -> None:
            work()
            if more:
                self._read_behind()

        host = self._locations.host
        return self._background.start(works, host.memory.device if host is not None else None)
