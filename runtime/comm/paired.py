"""Two transports of one rank that its collectives are divided between, as one to who enters and leaves programs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime.comm.communicator import Communicator, HostGathers
from zerograph.runtime.comm.entry import Entry, sequence_of
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.own_stream import Wait
from zerograph.runtime.torch_private import gloo_group, name_group, unname_group


class PairedCommunicator(Communicator, HostGathers):
    """Collectives are those of ``inner``, unless a subclass divides them.

    Both transports share one rendezvous, of all ranks: an error on one ends the program on all.

    Attributes:
        per_host: ranks of each host, where the transports are those inside of hosts and between them; else None.
    """

    per_host: int | None = None

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        """Ranks of equal place in ``inner`` are those of one ``outer`` transport."""
        self.inner, self.outer, self.steps = inner, outer, 0
        self.name, self.rank, self.world_size, self.pool = inner.name, inner.rank, inner.world_size, inner.pool
        self.rendezvous = outer.rendezvous
        if isinstance(inner, PairedCommunicator):
            self.per_host = inner.per_host

    def trim(self) -> None:
        self.inner.trim()
        self.outer.trim()

    def rejoin(self) -> None:
        self.inner.rejoin()
        self.outer.rejoin()

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        self.inner.enter(entry, compared=compared)
        self.outer.enter(entry, compared=compared)
        self.steps = entry.steps

    def leave(self) -> None:
        """Wait for the ranks of both transports, one after the other: those that the second brings have waited for
        theirs of the first."""
        self.inner.leave()
        self.outer.leave()

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()) -> Any:
        return self.inner.start_gather(params, shards, behind)

    def finish_gather(self, pending: Any) -> list[Tensor]:
        return self.inner.finish_gather(pending)

    def host_parts(self, pending: Any) -> Sequence[Tensor]:
        return cast(HostGathers, self.inner).host_parts(pending)

    def start_gather_inside(self, params: Sequence[Param], parts: Sequence[Tensor]) -> Any:
        return cast(HostGathers, self.inner).start_gather_inside(params, parts)

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> Any:
        return self.inner.start_reduce(params, grads)

    def finish_reduce(self, pending: Any) -> list[Tensor]:
        return self.inner.finish_reduce(pending)

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Any:
        return self.inner.start_exchange(sends, sizes)

    def finish_exchange(self, pending: Any) -> list[Tensor]:
        return self.inner.finish_exchange(pending)

    def abort(self, reason: str) -> None:
        try:
            self.inner.abort(reason)
        finally:
            self.outer.abort(reason)


class OwnConnections:
    """Connections of ours for the collectives that compiled graphs have on a group of the user's.

    A rank that waits in such a collective, inside of a segment, hears of nothing. It ends where another rank closes its
    connections. ``torch.distributed`` has no call that does: over gloo ``abort()`` and ``shutdown()`` leave them open,
    and the user's group lives as long as its mesh. After an error ranks go on with new ones, as on the data axis.

    Attributes:
        name: under which graphs find them; the same in every generation.
        group: the user's, in whose place they are.
    """

    def __init__(
        self, group: dist.ProcessGroup, rendezvous: Rendezvous, ranks: Sequence[int], device: torch.device
    ) -> None:
        """The ``ranks`` of ``group``, as ``rendezvous`` numbers them, call this together."""
        names = (f"{group.group_name} of zerograph {number}" for number in itertools.count())
        # One for each backend. No hash: compilers keep what they made of a graph under its text.
        self.name = next(name for name in names if name not in _NAMES)
        self.group, self._rendezvous, self._ranks, self._device = group, rendezvous, ranks, device
        self._own: list[dist.ProcessGroup] = []  # one while they are open; nobody else holds it
        self._generation = -1
        _NAMES.add(self.name)
        rendezvous.hang_up = partial(_close, self.name, self._own)
        weakref.finalize(rendezvous, _forget, self.name)  # which may hang up as long as it lives
        self.follow()

    def follow(self) -> None:
        """Connect in the rendezvous's generation, unless that was done, or tried; all ranks call this."""
        rendezvous, ranks = self._rendezvous, self._ranks
        if self._generation == rendezvous.generation:
            return
        self._generation = rendezvous.generation
        self.close()
        place = f"graphs/{rendezvous.generation}/{ranks[0]}-{ranks[-1]}"
        store, timeout = dist.PrefixStore(place, rendezvous.store.raw), timedelta(seconds=rendezvous.timeout)
        here = ranks.index(rendezvous.rank)
        self._own.append(gloo_group(store, here, len(ranks), timeout, self._device, timeout))
        name_group(self.name, self._own[0])

    def close(self) -> None:
        """End what other ranks wait for, in this generation."""
        _close(self.name, self._own)


_NAMES: set[str] = set()
# Torch's table of groups is the process's.


def _forget(name: str) -> None:
    unname_group(name)
    _NAMES.discard(name)


def _close(name: str, own: list[dist.ProcessGroup]) -> None:
    unname_group(name)
    own.clear()  # a group closes with its object


class SpanningCommunicator(PairedCommunicator):
    """The transport of shards, beside ranks that compute other parts of the same parameters.

    Programs begin and end on both axes together. A rank begins one when those beside it do, as its graph has
    collectives with them; an error ends these too, where they have ``own`` connections.
    """

    def __init__(self, shards: Communicator, beside: Communicator, own: OwnConnections | None) -> None:
        super().__init__(shards, beside)
        self._own = own

    @property
    def groups(self) -> Mapping[str, str]:
        """The group that collectives in graphs are to use instead of each, by name."""
        return {} if self._own is None else {self._own.group.group_name: self._own.name}

    def rejoin(self) -> None:
        super().rejoin()
        if self._own is not None:
            self._own.follow()

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`. Collectives are compared along the data axis;
        beside it parts of parameters may have other shapes, and kinds of programs and steps are."""
        self.rejoin()
        self.inner.enter(entry, compared=compared)
        beside = replace(entry, sequence=sequence_of([entry.program.partition(",")[0]]))
        self.outer.enter(beside, compared=compared)
        self.steps = entry.steps

    def abort(self, reason: str) -> None:
        try:
            super().abort(reason)
        finally:
            if self._own is not None:
                self._own.follow()  # the others wait for this rank to connect, and hear nothing meanwhile
                self._own.close()
