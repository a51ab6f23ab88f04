"""What a transport does, as the executor needs it.

A communicator starts and finishes three operations: gathering shards into full parameters, averaging full gradients
into shards (those of unsharded parameters are all-reduced), and an exchange, in which each rank sends every other one a
message of its own. Every rank must issue the same operations on the same parameters in the same order; programs see to
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime.buffers import BufferPool
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.own_stream import Wait


class Communicator(Protocol):
    """The transport, as the executor needs it. :mod:`zerograph.runtime.comm.rendezvous` recovers from errors."""

    name: str
    rank: int
    world_size: int
    steps: int
    """Optimizer steps, as compared at the last entry."""
    pool: BufferPool | None = None
    """Memory for what is gathered; None where the device's allocator has it."""
    rendezvous: Rendezvous | None = None
    """How ranks meet after an error; None where they are simulated."""

    @property
    def generation(self) -> int:
        """Counts the errors that ranks have recovered from."""
        return self.rendezvous.generation if self.rendezvous is not None else 0

    def trim(self) -> None:
        """Let go of memory that is kept to be used again."""
        if self.pool is not None:
            self.pool.trim()

    def rejoin(self) -> None:
        """Meet the other ranks after an error, if there was one: before a program is entered, or compiled.

        Raises:
            RankError: another rank does not come.
        """

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """This rank begins a program with collectives; after an error, once all ranks do.

        Args:
            compared: whether it is compared with what the others begin also where that waits for the device.

        Raises:
            RankError: another rank failed, or does not come.
            CollectiveMismatch: another rank begins another program, or has taken more or fewer optimizer steps.
        """

    def leave(self) -> None:
        """Wait until all ranks have come to the end of the program they entered.

        Raises:
            RankError: another rank failed in it.
        """

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()) -> Any:
        """Begin to gather ``shards`` (this rank's rows, maybe none); returns what :meth:`finish_gather` takes.

        Args:
            behind: copies to an accelerator that bring some of them. What computes does not wait for them.
        """

    def finish_gather(self, pending: Any) -> list[Tensor]:
        """The full parameters, in compute dtype, contiguous."""

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> Any:
        """Begin to average full gradients; they may not change before :meth:`finish_reduce`."""

    def finish_reduce(self, pending: Any) -> list[Tensor]:
        """This rank's rows of the averaged gradients, in the shard's dtype."""

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Any:
        """Begin an all-to-all; returns what :meth:`finish_exchange` takes.

        Args:
            sends: this rank's message for each rank, flat, as bytes.
            sizes: bytes of the message of each rank for each rank, by sender and receiver; the same on all ranks.
        """

    def finish_exchange(self, pending: Any) -> list[Tensor]:
        """The messages for this rank, by sender, where the transport works."""

    def abort(self, reason: str) -> None:
        """This rank failed: let the others fail too, and meet them at the next program."""


class HostGathers(Protocol):
    """The gathers of a transport in two levels, between hosts and inside of each, whose ranks may keep what came to
    them from other hosts, each a part."""

    def host_parts(self, pending: Any) -> Sequence[Tensor]:
        """Of a finished gather this rank's part, by parameter: bytes of ``[hosts, shard]``."""

    def start_gather_inside(self, params: Sequence[Param], parts: Sequence[Tensor]) -> Any:
        """Begin to gather ``params`` from the parts of this host's ranks; for ``finish_gather`` of the transport."""
