"""Two transports of one rank that its collectives are divided between, as one to who enters and leaves programs."""

from __future__ import annotations

from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.rendezvous import Rendezvous


class PairedCommunicator:
    """See :class:`~zerograph.runtime.comm.communicator.Communicator`, whose collectives are left to what inherits this.

    Both transports share one rendezvous, of all ranks: an error on one ends the program on all.

    Attributes:
        per_host: ranks of each host, where the transports are those inside of hosts and between them; else None.
    """

    per_host: int | None = None

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        """Ranks of equal place in ``inner`` are those of one ``outer`` transport."""
        self.inner, self.outer, self.steps = inner, outer, 0

    @property
    def rendezvous(self) -> Rendezvous | None:
        """That of all ranks."""
        return self.outer.rendezvous

    @property
    def generation(self) -> int:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`."""
        return self.outer.generation

    def trim(self) -> None:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`."""
        self.inner.trim()
        self.outer.trim()

    def rejoin(self) -> None:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`."""
        self.inner.rejoin()
        self.outer.rejoin()

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`."""
        self.inner.enter(entry, compared=compared)
        self.outer.enter(entry, compared=compared)
        self.steps = entry.steps

    def leave(self) -> None:
        """Wait for the ranks of both transports, one after the other: those that the second brings have waited for
        theirs of the first."""
        self.inner.leave()
        self.outer.leave()

    def abort(self, reason: str) -> None:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`."""
        try:
            self.inner.abort(reason)
        finally:
            self.outer.abort(reason)
