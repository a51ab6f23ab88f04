"""Where a sharded parameter lies between steps: its values, and the copy that is gathered in their place. No torch.

Runtime, lowering and forecasts ask here. As in ZeRO-Offload, values live with the optimizer that updates them. Programs
gather a copy in the compute dtype where the values are elsewhere, or off the device and float32 of which 16 bits
compute.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from zerograph.core.machine import Tier, is_disk
from zerograph.core.plan import Bucket, Placement, Plan


class Role(Protocol):
    """The facts about a parameter that the rule needs, as :class:`~zerograph.core.step.Param` has them."""

    @property
    def trainable(self) -> bool:
        """Whether it is updated."""

    @property
    def is_master(self) -> bool:
        """Whether it is float32 of which 16 bits compute."""


class Unplanned(NamedTuple):
    """A parameter that no plan has yet. Where the host has another memory, values lie alike, masters or not."""

    trainable: bool
    is_master: bool = False


def values_tier(param: Role, placement: Placement, split: bool) -> Tier:
    """Where the values of a sharded parameter are, which an update writes and ``state_dict`` gives.

    Args:
        split: whether the host has another memory than the device. Where it has not, an update of values that compute
            as they are runs on them where parameters live: a copy beside the optimizer would take the same room.
    """
    return placement.optimizer if param.trainable and (param.is_master or split) else placement.parameters


def copy_tier(param: Role, placement: Placement, split: bool) -> Tier | None:
    """Where the copy in the compute dtype is that programs gather; None where they gather the values themselves."""
    values = values_tier(param, placement, split)
    if values == "device" or not (param.is_master or values != placement.parameters):
        return None
    return placement.parameters


def updated_late(plan: Plan, bucket: Bucket) -> bool:
    """Whether the shards of ``bucket`` are updated while the next step computes with copies of them from before, which
    are in memory."""
    if plan.overlap != "delayed" or bucket.placement.optimizer == "device":
        return False
    trained = [p for p in bucket.params if p.trainable and p.sharded]
    copies = [copy_tier(p, bucket.placement, split=True) for p in trained]
    return bool(copies) and all(tier is not None and not is_disk(tier) for tier in copies)


def second_copies(plan: Plan, bucket: Bucket) -> bool:
    """Whether such an update writes copies of its own, on the host, as what it updates is on its way to a disk."""
    return is_disk(bucket.placement.optimizer) and updated_late(plan, bucket)


def reads_again(bucket: Bucket) -> bool:
    """Whether an update of ``bucket`` reads from a disk the very shards that its gathers read there, and all of them:
    none has a copy that is gathered in its place, and all are trained."""
    placement, shards = bucket.placement, [p for p in bucket.params if p.sharded]
    alike = all(p.trainable and copy_tier(p, placement, split=True) is None for p in shards)
    return is_disk(placement.parameters) and bucket.tiles == 1 and alike
