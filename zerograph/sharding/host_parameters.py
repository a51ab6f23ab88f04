"""Outward parameters on the host of an accelerator, where they are updated: which, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zerograph.compiler.frame_plan import homes_of
from zerograph.core.config import Config
from zerograph.core.placement import Unplanned, values_tier
from zerograph.core.plan import Homes, Plan
from zerograph.runtime.homes.host import HostMemory
from zerograph.runtime.homes.hosted import home_for
from zerograph.runtime.torch_private import local_tensor, placed_as


def homes_by_name(config: Config) -> Callable[[str], Homes]:
    """Where the parts of each parameter will live, as far as that is known before a step is planned."""
    if config.plan is None:
        homes = homes_of(config)
        return lambda _: homes
    known = dict(homes_in(config.plan.plan))
    return lambda name: known.get(name, Homes())


def homes_in(plan: Plan) -> Iterator[tuple[str, Homes]]:
    """The homes of each sharded parameter of ``plan``."""
    return ((p.name, bucket.homes) for bucket in plan.buckets for p in bucket.params if p.sharded)


def is_outward_there(homes: Homes, param: nn.Parameter) -> bool:
    """Whether the outward parameter is on the host: its values are."""
    return values_tier(Unplanned(param.requires_grad), homes, split=True) == "host"


@torch.no_grad()
def moved(value: Tensor, host: HostMemory) -> Tensor:
    """``value``, a DTensor or a plain tensor, with this rank's part of it on the host."""
    local = local_tensor(value.detach())
    return placed_as(home_for(local, host).copy_(local), value)
