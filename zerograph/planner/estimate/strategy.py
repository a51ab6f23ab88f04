"""One way to train: a ZeRO stage, what is offloaded where, and what happens to activations and large operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.machine import OFFLOAD_TIERS, OffloadTier, Tier
from zerograph.core.plan import OFFLOADS, Offload, Placement, level_at
from zerograph.planner.search.constraints import PLACEMENTS, open_placements

Stage = Literal[0, 1, 2, 3]
Activations = Literal["keep", "recompute", OffloadTier]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
ACTIVATIONS: tuple[Activations, ...] = ("keep", "recompute", *OFFLOAD_TIERS)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The strategy that a row of the estimate stands for.

    Attributes:
        stage: what is sharded over ranks: nothing (0), optimizer states (1), gradients too (2), parameters too (3).
        offload: what leaves the device, one of :data:`~zerograph.core.plan.OFFLOADS`, if the stage shards it.
        tier: where it goes.
        activations: kept; recomputed from one checkpoint per layer; or that, with the checkpoints on another tier.
        tiles: parts that the largest operator, and the head with its loss, are run in (ZeRO-Infinity's
            memory-centric tiling).
    """

    stage: Stage
    offload: Offload = "none"
    tier: Tier = "device"
    activations: Activations = "keep"
    tiles: int = 1

    def __post_init__(self) -> None:
        if (level_at(self.stage, self.offload) == 0) != (self.tier == "device"):
            raise ConfigError(
                f"offload {self.offload} and tier {self.tier} do not go together",
                f"offload something to {' or '.join(OFFLOAD_TIERS)}, or offload none and leave the tier on the device",
            )
        if self.tiles < 1:
            raise ConfigError(f"tiles must be at least 1, got {self.tiles}")

    @property
    def placement(self) -> Placement:
        """Where parameters, gradients and optimizer states live between steps."""
        (found,) = open_placements(self.offload, (self.tier,), self.stage)
        return found

    @property
    def recomputes(self) -> bool:
        """Whether the backward runs each layer's forward again."""
        return self.activations != "keep"

    @property
    def name(self) -> str:
        """For people: ``stage 3, parameters on nvme``."""
        return f"stage {self.stage}" + ("" if self.offload == "none" else f", {self.offload} on {self.tier}")


def placements(tiers: tuple[Tier, ...]) -> tuple[tuple[Stage, Offload, Tier], ...]:
    """Every stage with every offload it allows to every tier of ``tiers``; the first ones offload nothing."""
    found: list[tuple[Stage, Offload, Tier]] = [(stage, "none", "device") for stage in STAGES]
    for tier in tiers:
        for level in (placement.least_stage for placement in PLACEMENTS if placement.offload_tiers == {tier}):
            found += [(stage, OFFLOADS[level], tier) for stage in STAGES if stage >= level]
    return tuple(found)
