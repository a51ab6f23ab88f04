"""An update in chunks through a ring of slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from zerograph.core.slots import SLOTS

C = TypeVar("C")


class Updating(Protocol):
    """An update of one chunk, as :class:`~zerograph._core.Ticket` is."""

    @property
    def ended(self) -> int:
        """When it was done, in nanoseconds since 1970; 0 while it runs, and where a device does it in its own time."""

    def wait(self) -> bool:
        """Return when the next chunk may be read over the one before."""


def through_slots(
    chunks: Sequence[C],
    read: Callable[[C], None],
    wait: Callable[[C], None],
    update: Callable[[C], Updating],
    write: Callable[[C], None],
    ended: Callable[[C, int, int], None] = lambda *_: None,
) -> None:
    """While one of ``chunks`` is updated, the next ones are read and the one before is written.

    Each has the slot of the one :data:`SLOTS` before it. ``read`` and ``write`` begin transfers, for which ``wait``
    waits. Where anything raises, transfers may be under way, and no update is. ``ended`` hears of each update when it
    began and ended, in nanoseconds since 1970.
    """
    ahead = min(SLOTS - 1, len(chunks))
    for chunk in chunks[:ahead]:
        read(chunk)
    for i, chunk in enumerate(chunks):
        wait(chunk)
        begin = time.time_ns()
        ticket = update(chunk)
        try:
            if i + ahead < len(chunks):
                if i:
                    wait(chunks[i - 1])  # in whose slot the next one is read
                read(chunks[i + ahead])
        finally:
            ticket.wait()
            ended(chunk, begin, ticket.ended)
        write(chunk)
    for chunk in chunks[-SLOTS:]:
        wait(chunk)
