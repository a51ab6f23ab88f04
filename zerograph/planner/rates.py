"""What one rank pays for the parts of a step: seconds of compute and collectives, bytes of parameters and states.

Forecasts of real programs and the search over plans count by these same rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerograph.ir import ITEM_SIZE, Param
from zerograph.machine import Machine


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds on one rank of ``world_size`` on ``machine``, most of whose parameters compute in ``dtype``."""

    machine: Machine
    world_size: int
    dtype: str

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside compute; CPU ranks carry them with the cores that compute."""
        return self.machine.device != "cpu"

    def compute(self, flops: float, moved: float) -> float:
        """A compute task: its products, and the bytes that it reads and writes."""
        machine = self.machine
        matmul = machine.matmul.get(self.dtype, machine.matmul["float32"])
        return flops / matmul + moved / machine.device_bandwidth + machine.launch

    def collective(self, size: float) -> float:
        """An all-gather or a reduction of ``size`` bytes."""
        world = self.world_size
        return self.machine.collective(world).seconds(size * (world - 1) / world)

    def update(self, params: Iterable[Param], moments: int) -> float:
        """The optimizer's pass over the shards of trainable ``params``, their gradients and ``moments`` tensors."""
        size = sum(shard_bytes(p, self.world_size) for p in params if p.trainable)
        return size * (3 + 2 * moments) / self.machine.device_bandwidth


def shard_bytes(param: Param, world_size: int) -> int:
    """Bytes of the largest shard of ``param``."""
    return param.chunk_elements(world_size) * ITEM_SIZE[param.dtype]


def gathered_bytes(params: Iterable[Param], world_size: int) -> int:
    """Bytes that an all-gather of ``params`` fills: every rank's rows, padded to the largest shard."""
    return sum(
        p.chunk_elements(world_size) * (world_size if p.sharded else 1) * ITEM_SIZE[p.compute_dtype] for p in params
    )


def reduced_bytes(params: Iterable[Param]) -> int:
    """Bytes of the full gradients of ``params`` as they are summed over ranks."""
    return sum(p.elements * ITEM_SIZE[p.reduce_dtype] for p in params)


def state_bytes(params: Iterable[Param], world_size: int, moments: int) -> tuple[int, int]:
    """What lies on the device between steps: bytes of the shards, and of the optimizer's moments."""
    shards = states = 0
    for param in params:
        size = shard_bytes(param, world_size)
        shards += size
        states += size * moments if param.trainable else 0
    return shards, states
