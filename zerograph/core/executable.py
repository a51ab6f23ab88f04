"""What backends carry out of all that can be planned, for whoever searches plans and whoever refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerograph.core.machine import Machine, Tier
from zerograph.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Executable:
    """What a backend carries out on one kind of device.

    Attributes:
        tiers: beside the device, that shards may live on.
        activations: whether saved activations may leave the device.
        tiles: whether parameters and the loss may be in tiles.
    """

    tiers: tuple[Tier, ...]
    activations: bool = False
    tiles: bool = False

    @classmethod
    def on(cls, machine: Machine) -> Executable:
        """What a backend carries out on ``machine``.

        NVMe behind another memory on the host is not reached.
        """
        return cls(("host",) if machine.has_host else ("nvme",))

    def missing(self, plan: Plan) -> str:
        """What ``plan`` needs beyond that, for people; empty when it can be run."""
        return "; ".join(self._missing(plan))

    def _missing(self, plan: Plan) -> Iterator[str]:
        away = (b for b in plan.buckets if not b.homes.away <= {*self.tiers})
        yield from (f"{b.homes} (bucket {b.name})" for b in [*away][:1])
        if plan.offload and not self.activations:
            name, tier = plan.offload[0]
            yield f"activations of {name} on {tier}"
        if not self.tiles:
            yield from [f"{b.tiles} tiles of {b.params[0].name}" for b in plan.buckets if b.tiles > 1][:1]
            if plan.loss_tiles > 1:
                yield f"head and loss in {plan.loss_tiles} tiles"
