"""Collectives between CPU ranks of several hosts, in two levels: the network joins ranks of equal place in their hosts,
and shared memory those of a host.

A byte so comes to a host once, and a gather or a reduction of P bytes over h hosts sends (h - 1) / h of P from each. A
ring over all ranks passes almost all of P through every host, and gloo, which has no reduce-scatter, does it twice for
one. Gradients are summed in the order of ranks in each host, and these sums in the order of hosts, both in float32
(float64 for float64): at every stage alike. A host's part of a mean travels in the dtype of the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.runtime.buffers import allocate_full
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.packing import padded_shards
from zerograph.runtime.comm.paired import PairedCommunicator
from zerograph.runtime.comm.shared_memory import SharedMemoryCommunicator, summable
from zerograph.runtime.comm.wires import Terms, elements_of, spread
from zerograph.runtime.own_stream import Wait

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class _Gathering:
    params: Sequence[Param]
    between: Any = None  # brings from every host the shard of its rank of this place
    parts: Sequence[Tensor] = ()  # what it has brought, by parameter: ``[hosts, bytes]``


@dataclass(slots=True, eq=False)
class _Reducing:
    terms: Terms
    between: Any  # brings the sums of every host


@dataclass(slots=True, eq=False)
class _Exchanging:
    sizes: Sequence[Sequence[int]]
    between: Any


class TwoLevelCommunicator(PairedCommunicator):
    """A reduction is summed in the host when it begins, which waits for the ranks of that, and is under way over the
    network until it is finished. Of an unsharded parameter every rank then has the means of a part, which are gathered.
    """

    per_host: int

    def __init__(self, host: SharedMemoryCommunicator, network: Communicator) -> None:
        """``network`` joins the ranks that are at the same place in their hosts, by the order of hosts; ranks are
        numbered host by host."""
        super().__init__(host, network)
        self.host, self.network = host, network
        self.hosts, self.per_host = network.world_size, host.world_size
        self.rank, self.world_size = network.rank * self.per_host + host.rank, self.hosts * self.per_host
        self.name = f"{host.name} in each of {self.hosts} hosts, between them {network.name}"
        self._peers = range(host.rank, self.world_size, self.per_host)  # the ranks of this place

    def start_gather(
        self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
    ) -> _Gathering:
        # As one parameter, whose parts come to where they are read.
        flat = torch.cat([send.view(torch.uint8) for send in padded_shards(params, shards, _CPU)])
        size, wire = self.hosts * flat.numel(), "uint8"
        message = Param(params[0].name, (size,), wire, wire, wire, False, Layout("rows", self.hosts))
        return _Gathering(params, self.network.start_gather([message], [flat], behind))

    def finish_gather(self, pending: _Gathering) -> list[Tensor]:
        params = pending.params
        if pending.between is not None:
            (brought,), pending.between = self.network.finish_gather(pending.between), None
            pending.parts = brought.view(self.hosts, -1).split([p.sent_bytes for p in params], 1)
        full = allocate_full(params, _CPU, self.host.pool)
        pieces, outs = [], []
        for p, room, part in zip(params, full.padded, pending.parts, strict=True):
            for shard, place in zip(part, room.view(self.hosts, -1), strict=True):
                pieces.append((shard, shard.dtype))  # bytes, which may begin anywhere
                outs.append((place, p.sent_bytes))
        self.host.end_gather(params, self.host.begin_gather(params, pieces), outs)
        return full.tensors

    def host_parts(self, pending: _Gathering) -> Sequence[Tensor]:
        return pending.parts

    def start_gather_inside(self, params: Sequence[Param], parts: Sequence[Tensor]) -> _Gathering:
        return _Gathering(params, parts=parts)

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _Reducing:
        flat = [summable(g, p).contiguous().view(-1) for p, g in zip(params, grads, strict=True)]
        own = [p.summed_elements for p in params]
        # For each host a piece of each gradient, whose parts are those of its ranks.
        pieces = [
            (grad[host * self.per_host * size :][: self.per_host * size], size)
            for host in range(self.hosts)
            for grad, size in zip(flat, own, strict=True)
        ]
        ticket = self.host.begin_reduce(params, pieces)
        terms = Terms(params)
        messages = terms.messages(self.hosts, _CPU)
        # What is sent in fewer bits is summed in this host first.
        sums = [
            torch.zeros(self.hosts, p.summed_elements, device=_CPU) if p.reduce_wire else terms.room_of(messages, which)
            for which, p in enumerate(params)
        ]
        parts = [
            by_host[host][: elements_of(p, rank)]
            for host, rank in enumerate(self._peers)
            for p, by_host in zip(params, sums, strict=True)
        ]
        self.host.end_reduce(params, ticket, parts, 1.0 / self.world_size)
        for which, (p, by_host) in enumerate(zip(params, sums, strict=True)):
            if p.reduce_wire:
                terms.write(messages, which, by_host)
        sizes = [[terms.bytes] * self.hosts] * self.hosts
        return _Reducing(terms, self.network.start_exchange(list(messages), sizes))

    def finish_reduce(self, pending: _Reducing) -> list[Tensor]:
        terms = pending.terms
        means = terms.sums(self.network.finish_exchange(pending.between), self.rank)
        return spread(self, terms.params, means, self.rank)

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> _Exchanging:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`: first to the right host."""
        by_host = [slice(first, first + self.per_host) for first in range(0, self.world_size, self.per_host)]
        between = [[sum(sizes[rank][there]) for there in by_host] for rank in self._peers]
        messages = [torch.cat(list(sends[there])) for there in by_host]
        return _Exchanging(sizes, self.network.start_exchange(messages, between))

    def finish_exchange(self, pending: _Exchanging) -> list[Tensor]:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`: then to the right rank of the host."""
        sizes, first = pending.sizes, self.network.rank * self.per_host
        here = range(first, first + self.per_host)
        brought = [
            message.split([sizes[rank][receiver] for receiver in here])
            for rank, message in zip(self._peers, self.network.finish_exchange(pending.between), strict=True)
        ]
        senders = [range(place, self.world_size, self.per_host) for place in range(self.per_host)]
        inside = [[sum(sizes[rank][receiver] for rank in place) for receiver in here] for place in senders]
        passed = self.host.start_exchange([torch.cat(parts) for parts in zip(*brought, strict=True)], inside)
        found: list[Tensor] = [None] * self.world_size  # type: ignore[list-item]
        for place, message in zip(senders, self.host.finish_exchange(passed), strict=True):
            found[place.start :: self.per_host] = message.split([sizes[rank][self.rank] for rank in place])
        return found
