"""The costs of the parts of a step for one rank: seconds of compute and collectives, bytes of parameters and states.

Forecasts of real programs and the search over plans count by these same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerograph.core.cost import Cost, Counted
from zerograph.core.instructions import (
    Accumulate,
    Collective,
    Compute,
    DeviceUpdate,
    Gather,
    HostUpdate,
    Move,
    Place,
    Reduce,
    Scale,
    Timed,
    Update,
)
from zerograph.core.machine import Machine, Tier, is_disk
from zerograph.core.plan import Plan
from zerograph.core.program import Segment

WAKE = 5e-5
"""Seconds that an update on the host takes however small it is: its threads wake, share the work and meet again."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds on one rank of ``world_size`` in each of so many ``replicas``, on ``machine``; most parameters compute in
    ``dtype``."""

    machine: Machine
    world_size: int
    dtype: str
    replicas: int = 1

    @classmethod
    def of(cls, machine: Machine, plan: Plan) -> Rates:
        """Those of the ranks that run ``plan``."""
        return cls(machine, plan.world_size, plan.compute_dtype, plan.replicas)

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside compute; CPU ranks carry them with the cores that compute."""
        return self.machine.device != "cpu"

    @property
    def network(self) -> bool:
        """Whether collectives of CPU ranks cross a network between hosts, which carries its part beside compute."""
        return self.machine.device == "cpu" and self.machine.nodes(self.world_size * self.replicas) > 1

    @property
    def uses_buffers_again(self) -> bool:
        """Whether gathered buckets take turns in the same memory, as with the transport between the ranks of a CPU."""
        return self.machine.device == "cpu" and self.world_size > 1

    def seconds(self, instruction: Timed, segments: Sequence[Segment]) -> float:
        """One instruction of a program with these segments."""
        match instruction:
            case Compute():
                segment = segments[instruction.segment]
                seconds = self.compute(segment)
                if segment.slices == 1:
                    return seconds
                # Each slice is launched by itself; the products and bytes are shared.
                launch = self.machine.launch
                return max(0.0, seconds - launch) / segment.slices + launch
            case Place() | Accumulate():
                return self.compute(Cost(instruction.flops, instruction.moved, instruction.packed))
            case Scale():
                return self.compute(Cost(moved=instruction.moved))
            case Gather(inside=True):
                return self.inside(instruction.bytes)
            case Gather():
                return self.collective(instruction.bytes)
            case Reduce():
                return self.reduction(instruction.bytes, instruction.averaged)
            case Update(sizes=sizes):
                return sum(map(self.machine.update.seconds, sizes))
            case HostUpdate():
                return self.host_update(instruction.bytes, instruction.updated)
            case DeviceUpdate():
                update = self.machine.update
                return instruction.updated * update.latency + instruction.bytes / update.rate
            case Move(source=source, target=target, what=what, bytes=size):
                # An update reads and writes states at the same time.
                return self.transfer(source, target, size, both=what == "states")

    def compute(self, cost: Counted) -> float:
        """A compute task."""
        moved = cost.moved
        if self.machine.device == "cpu":
            # Its libraries write matrices in blocks and read these. With many rows that is little beside the product.
            moved += 2 * cost.packed
        seconds = self.products(cost.flops - cost.attention) + moved / self.machine.device_bandwidth
        if cost.attention:
            seconds += cost.attention / self.machine.attention_rate(self.dtype)
        return seconds + self.machine.launch

    def products(self, flops: float) -> float:
        """The products of a compute task."""
        return flops / self.machine.product_rate(self.dtype)

    def collective(self, size: float) -> float:
        """An all-gather of ``size`` bytes, or a reduction of them into shards."""
        machine, world = self.machine, self.world_size
        hosts = machine.hosts(world)
        if hosts > 1:
            # Ranks of one place in their hosts have a part of it each, at once, and the rate between hosts is a host's.
            between = machine.collective(hosts, stride=world // hosts)
            return between.seconds(size * (hosts - 1) / hosts) + self.inside(size)
        return self.inside(size)

    def inside(self, size: float) -> float:
        """The part of a collective of ``size`` bytes that the ranks of each host have among themselves."""
        ranks = self.world_size // self.machine.hosts(self.world_size)
        # A rank's own part does not travel.
        return self.machine.collective(ranks).seconds(size * (ranks - 1) / ranks)

    def cores(self, instruction: Collective) -> float:
        """Seconds of a collective between hosts of CPUs in which cores carry it: those of its part inside of hosts."""
        machine, world = self.machine, self.world_size
        # Ranks of unequal hosts, or of one rank each, have one level, which the network carries.
        inside = machine.hosts(world) > 1 or world <= machine.ranks_per_node
        return self.inside(instruction.bytes) if inside else 0.0

    def reduction(self, size: float, averaged: float) -> float:
        """A reduction of ``size`` bytes, and the average of a rank's ``averaged`` ones over the replicas."""
        seconds, machine, replicas = self.collective(size), self.machine, self.replicas
        if replicas > 1:
            between = machine.collective(replicas, stride=self.world_size)
            # All ranks of a host average at once, and the rate between hosts is a host's.
            apart = self.world_size * replicas > machine.ranks_per_node
            sharers = min(self.world_size, machine.ranks_per_node) if apart else 1
            # As a reduction into parts, and a gather of these.
            seconds += 2 * between.seconds(averaged * sharers * (replicas - 1) / replicas)
        return seconds

    @property
    def staging(self) -> Tier:
        """The tier of the buffers that disks read and write."""
        return self.machine.staging

    def transfer(self, source: Tier, target: Tier, size: float, *, both: bool = False) -> float:
        """``size`` bytes of this rank to a neighbour, over a link of its own, or of a disk over one that the node's
        ranks share.

        With ``both`` as much is read meanwhile as is written: so an update goes through states.
        """
        shared = is_disk(source) or is_disk(target)
        return self.machine.link(source, target, both=both).seconds(size * self._sharers if shared else size)

    def host_update(self, traffic: float, updated: int) -> float:
        """An update of so many parameters on the host that reads and writes ``traffic`` bytes, while all ranks of the
        node do the same."""
        seconds, update = WAKE + traffic * self._sharers / self.machine.cpu_optimizer, self.machine.update
        if self.staging != "device":
            return seconds
        # The same processor updates what is in memory, by the same code: no update gets faster by leaving it.
        return max(seconds, updated * update.latency + traffic / update.rate)

    @property
    def _sharers(self) -> int:
        return min(self.world_size * self.replicas, self.machine.ranks_per_node)
