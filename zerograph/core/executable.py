"""The part of all plans that backends can carry out, for whoever searches plans and whoever refuses them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from zerograph.core.machine import DISKS, OFFLOAD_TIERS, Machine, Tier, is_disk
from zerograph.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Executable:
    """The features that a backend carries out on one kind of device. Which parameters may be in tiles, a step says.

    Attributes:
        tiers: beside the device, that shards may live on, and activations wait on for the backward.
    """

    tiers: tuple[Tier, ...]

    @classmethod
    def on(cls, machine: Machine, disks: Container[Tier] = DISKS) -> Executable:
        """The features that a backend carries out on ``machine``.

        Args:
            disks: on which it has folders.
        """
        return cls(tuple(tier for tier in OFFLOAD_TIERS if (tier in disks if is_disk(tier) else machine.has_host)))

    def missing(self, plan: Plan) -> str:
        """The features that ``plan`` needs beyond those, for people; empty when it can be run."""
        return "; ".join(self._missing(plan))

    def _missing(self, plan: Plan) -> Iterator[str]:
        offloaded = (b for b in plan.buckets if not b.placement.offload_tiers <= {*self.tiers})
        yield from (f"{b.placement} (bucket {b.name})" for b in [*offloaded][:1])
        saved = (one for one in plan.offload if one[1] not in self.tiers)
        yield from (f"activations of {name} on {tier}" for name, tier in [*saved][:1])
        if plan.loss_tiles > 1 and not plan.head:
            yield f"head and loss in {plan.loss_tiles} tiles, of logits without a name"
