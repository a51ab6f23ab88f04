"""Collectives over two axes of a mesh: parameters are gathered along one, and gradients averaged along both (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from zerograph.core.layout import Layout
from zerograph.core.plan import Param
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.paired import PairedCommunicator


@dataclass(slots=True, eq=False)
class _PendingHybrid:
    """A reduction: into ``shards``, from which these are the ``results``; those that have elements go on to the
    ``replicas``."""

    params: Sequence[Param]
    shards: Any
    results: list[Tensor] = field(default_factory=list)
    replicas: Any = None


class HybridCommunicator(PairedCommunicator):
    """``rank`` and ``world_size`` are those of shards.

    A reduction goes on to the replicas when the next one begins, and is under way there meanwhile.
    """

    def __init__(self, shards: Communicator, replicas: Communicator) -> None:
        super().__init__(shards, replicas)
        self.shards, self.replicas = shards, replicas
        self.name = f"{shards.name}; between replicas {replicas.name}"
        self._last: _PendingHybrid | None = None  # that is not under way between replicas

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        self._last = None  # of a program that failed
        super().enter(entry, compared=compared)

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _PendingHybrid:
        self._pass_on()
        # Between the axes nothing is rounded to the parameter's dtype.
        wide = [replace(p, dtype="float64" if p.reduce_dtype == "float64" else "float32") for p in params]
        self._last = _PendingHybrid(params, self.shards.start_reduce(wide, grads))
        return self._last

    def _pass_on(self) -> None:
        pending, self._last = self._last, None
        if pending is None:
            return
        pending.results, pending.shards = self.shards.finish_reduce(pending.shards), None
        # Each rank's part is another parameter's to the ranks of this axis: one that they all hold.
        whole = Layout("whole", self.replicas.world_size)
        parts = [replace(p, shape=p.shard_shape(self.rank), home=whole) for p in pending.params]
        filled = [(part, grad) for part, grad in zip(parts, pending.results, strict=True) if grad.numel()]
        pending.replicas = self.replicas.start_reduce([part for part, _ in filled], [grad for _, grad in filled])

    def finish_reduce(self, pending: _PendingHybrid) -> list[Tensor]:
        if pending is self._last:
            self._pass_on()
        averaged = iter(self.replicas.finish_reduce(pending.replicas))
        rows = zip(pending.params, pending.results, strict=True)
        return [next(averaged) if grad.numel() else grad.to(torch_dtype(p.dtype)) for p, grad in rows]
