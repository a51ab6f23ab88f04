"""Bytes of one bucket's shards: what lies on which tier between steps, and what a step moves between them.

The same accounting as :mod:`zerograph.planner.states`: the master copy lives with the optimizer. On the device it is
the shard that is gathered; off it, parameters are a copy in the compute dtype beside it. Scalars and parameters of
fewer rows than ranks are not sharded, so they stay on the device wherever their bucket goes, and so do shards that are
not trained unless the parameters leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerograph.core.machine import Tier
from zerograph.core.plan import Homes
from zerograph.core.simulate import Memory
from zerograph.core.step import Param
from zerograph.planner.rates import copy_bytes, shard_bytes


@dataclass(frozen=True, slots=True)
class Shards:
    """Bytes of what of one bucket can leave the device, on one rank.

    Attributes:
        copy: shards of trainable parameters in the compute dtype.
        frozen: shards of parameters that are not trained.
        gradient: of their reduced gradients.
        optimizer: master copy and moments.
    """

    copy: int
    frozen: int
    gradient: int
    optimizer: int

    @classmethod
    def of(cls, params: Sequence[Param], world_size: int, moments: int) -> Shards:
        """Of the sharded ones of ``params``."""
        trained = [p for p in params if p.sharded and p.trainable]
        masters = sum(shard_bytes(p, world_size) for p in trained)
        return cls(
            copy=sum(copy_bytes(p, world_size) for p in trained),
            frozen=sum(shard_bytes(p, world_size) for p in params if p.sharded and not p.trainable),
            gradient=masters,
            optimizer=masters * (1 + moments),
        )

    @property
    def fetched(self) -> int:
        """Bytes that come to the device before a gather, when the parameters live elsewhere."""
        return self.copy + self.frozen

    @property
    def traffic(self) -> int:
        """Bytes that an update on the host reads and writes: gradient, states twice, and the new copy."""
        return self.gradient + 2 * self.optimizer + self.copy

    def moved(self, homes: Homes) -> Memory:
        """What ``homes`` add to each tier between steps, and take off the device (below zero)."""
        if homes.optimizer == "device":
            return ()
        found: list[tuple[Tier, int]] = [
            ("device", -self.optimizer),
            (homes.optimizer, self.optimizer),
            (homes.parameters, self.copy),
        ]
        if homes.parameters != "device":
            found += [("device", -self.frozen), (homes.parameters, self.frozen)]
        return tuple(found)
