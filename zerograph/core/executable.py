"""The part of all plans that backends can carry out, for whoever searches plans and whoever refuses them.

Which parameters may be in tiles, a step says.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from zerograph.core.machine import DISKS, OFFLOAD_TIERS, Machine, Tier, is_disk
from zerograph.core.plan import Plan


def tiers_run(machine: Machine, disks: Container[Tier] = DISKS) -> tuple[Tier, ...]:
    """The tiers of ``machine`` beside the device on which a backend keeps shards, and activations for the backward.

    Args:
        disks: on which it has folders.
    """
    return tuple(tier for tier in OFFLOAD_TIERS if (tier in disks if is_disk(tier) else machine.has_host))


def missing(plan: Plan, tiers: tuple[Tier, ...]) -> str:
    """The features that ``plan`` needs beyond ``tiers`` (:func:`tiers_run`), for people; empty when it can be run."""
    return "; ".join(_missing(plan, tiers))


def _missing(plan: Plan, tiers: tuple[Tier, ...]) -> Iterator[str]:
    offloaded = (b for b in plan.buckets if not b.placement.offload_tiers <= {*tiers})
    yield from (f"{b.placement} (bucket {b.name})" for b in [*offloaded][:1])
    saved = (one for one in plan.offload if one[1] not in tiers)
    yield from (f"activations of {name} on {tier}" for name, tier in [*saved][:1])
    if plan.loss_tiles > 1 and not plan.head:
        yield f"head and loss in {plan.loss_tiles} tiles, of logits without a name"
