"""Collectives over two axes of a mesh: parameters are gathered along one, and gradients averaged along both (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime.comm.axes import Axes
from zerograph.runtime.comm.collectives import Communicator, connect
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.rendezvous import Rendezvous


@dataclass(slots=True)
class _PendingHybrid:
    params: Sequence[Param]
    reducing: Any


class HybridCommunicator:
    """See :class:`~zerograph.runtime.comm.collectives.Communicator`; ``rank`` and ``world_size`` are those of shards.

    Both transports share one rendezvous, of all ranks: an error on one ends the program on all.
    """

    def __init__(self, shards: Communicator, replicas: Communicator) -> None:
        self.shards, self.replicas = shards, replicas
        self.name = f"{shards.name}; between replicas {replicas.name}"
        self.rank, self.world_size, self.steps = shards.rank, shards.world_size, 0

    @property
    def rendezvous(self) -> Rendezvous | None:
        """That of all ranks."""
        return self.shards.rendezvous

    @property
    def generation(self) -> int:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        return self.shards.generation

    def trim(self) -> None:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        self.shards.trim()
        self.replicas.trim()

    def rejoin(self) -> None:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        self.shards.rejoin()
        self.replicas.rejoin()

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        self.shards.enter(entry, compared=compared)
        self.replicas.enter(entry, compared=compared)
        self.steps = entry.steps

    def leave(self) -> None:
        """Wait for the ranks of both axes, one after the other: those that the second brings have waited for theirs of
        the first."""
        self.shards.leave()
        self.replicas.leave()

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Any:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        return self.shards.start_gather(params, shards)

    def finish_gather(self, pending: Any) -> list[Tensor]:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        return self.shards.finish_gather(pending)

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _PendingHybrid:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        # Between the axes nothing is rounded to 16 bits.
        wide = [replace(p, dtype="float64" if p.reduce_dtype == "float64" else "float32") for p in params]
        return _PendingHybrid(params, self.shards.start_reduce(wide, grads))

    def finish_reduce(self, pending: _PendingHybrid) -> list[Tensor]:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        results = self.shards.finish_reduce(pending.reducing)
        # Each rank's part is another parameter's to the ranks of this axis: one that they all hold.
        parts = [replace(p, shape=p.shard_shape(self.rank, self.world_size), sharded=False) for p in pending.params]
        filled = [i for i, result in enumerate(results) if result.numel()]
        begun = self.replicas.start_reduce([parts[i] for i in filled], [results[i] for i in filled])
        for i, averaged in zip(filled, self.replicas.finish_reduce(begun), strict=True):
            results[i] = averaged
        return results

    def abort(self, reason: str) -> None:
        """See :class:`~zerograph.runtime.comm.collectives.Communicator`."""
        try:
            self.shards.abort(reason)
        finally:
            self.replicas.abort(reason)


def connect_axes(axes: Axes, device: torch.device, rendezvous: Rendezvous | None = None) -> Communicator:
    """The fastest transports along ``axes``, whose ranks all call this.

    Raises:
        ConfigError: ``ZEROGRAPH_TRANSPORT`` is neither "auto" nor "group".
    """
    shards = connect(axes.shards, device, rendezvous, axes.places(axes.shards))
    if axes.replicas is None:
        return shards
    return HybridCommunicator(shards, connect(axes.replicas, device, rendezvous, axes.places(axes.replicas)))
