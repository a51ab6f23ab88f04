"""Where the shards of a bucket may live, and which of these places the user left open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.machine import OFFLOAD_TIERS, Machine, OffloadTier, Tier, is_disk
from zerograph.core.plan import Offload, Placement, level_at


def _with_states_on(tier: Tier) -> tuple[Placement, ...]:
    between = (Placement("host", "host", tier),) if is_disk(tier) else ()
    return Placement("device", "device", tier), Placement("device", tier, tier), *between, Placement(tier, tier, tier)


PLACEMENTS: tuple[Placement, ...] = (
    Placement(),
    *(placement for tier in OFFLOAD_TIERS for placement in _with_states_on(tier)),
)
"""The placements that the search looks at, from near to far."""


def open_tiers(
    machine: Machine, world_size: int, offload: Offload | Literal["auto"], tier: Tier | None
) -> tuple[OffloadTier, ...]:
    """The tiers that something may be offloaded to: those that exist, or the one that was asked for.

    Raises:
        ConfigError: offloading was asked for, and the machine has no such tier.
    """
    if offload == "none":
        return ()
    there = tuple(t for t in OFFLOAD_TIERS if machine.capacity(t, world_size))
    found = there if tier is None else tuple(t for t in there if t == tier)
    if not found and (offload != "auto" or tier is not None):
        raise ConfigError(
            f"{machine.name} has no {tier or ' or '.join(OFFLOAD_TIERS)} memory to offload to",
            f"it has {' and '.join(there)}" if there else "offload='none', or a machine that has some",
        )
    return found


def open_placements(offload: Offload | Literal["auto"], tiers: Sequence[Tier], stage: int) -> tuple[Placement, ...]:
    """Those of :data:`PLACEMENTS` that ``offload`` leaves open on ``tiers`` at ``stage``.

    "auto" leaves all open; "optimizer", "gradients" and "parameters" fix what leaves the device: that and what comes
    before it, and nothing else.
    """
    least = 0 if offload == "auto" else level_at(stage, offload)
    open_ = [p for p in PLACEMENTS if p.offload_tiers <= set(tiers) and p.least_stage <= stage]
    if offload in ("none", "auto"):
        return tuple(open_)
    # What leaves was given: neither less nor more may.
    return tuple(p for p in open_ if p.least_stage == least)
