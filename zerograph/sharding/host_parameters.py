"""Outward parameters off an accelerator, where they are updated: which, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zerograph.compiler.frame_plan import placement_of
from zerograph.core.config import Config
from zerograph.core.machine import Tier, is_disk
from zerograph.core.placement import Unplanned, values_tier
from zerograph.core.plan import Placement, Plan
from zerograph.runtime.offload.host import HostMemory
from zerograph.runtime.offload.hosted import host_like
from zerograph.runtime.torch_private import local_tensor, placed_as


def placement_by_name(config: Config) -> Callable[[str], Placement]:
    """Where the parts of each parameter will live, as far as that is known before a step is planned."""
    if config.plan is None:
        placement = placement_of(config)
        return lambda _: placement
    known = dict(placements_in(config.plan.plan))
    return lambda name: known.get(name, Placement())


def placements_in(plan: Plan) -> Iterator[tuple[str, Placement]]:
    """The placement of each sharded parameter of ``plan``."""
    return ((p.name, bucket.placement) for bucket in plan.buckets for p in bucket.params if p.sharded)


def outward_tier(placement: Placement, param: nn.Parameter) -> Tier:
    """Where the outward parameter is: where its values are. On a disk it is a mapping, and so a tensor of the host."""
    return values_tier(Unplanned(param.requires_grad), placement, split=True)


@torch.no_grad()
def moved(value: Tensor, tier: Tier, host: HostMemory) -> Tensor:
    """``value``, a DTensor or a plain tensor, with this rank's part of it on the host, on its way to ``tier``."""
    local = local_tensor(value.detach())
    # What goes on to a disk is there for a short time: page-locked memory would be kept.
    there = local.cpu() if is_disk(tier) else host_like(local, host).copy_(local)
    return placed_as(there, value)
