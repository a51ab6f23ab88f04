"""One way to train: a ZeRO stage, what is offloaded where, and what happens to activations and large operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerograph.core.errors import ConfigError
from zerograph.core.machine import Tier
from zerograph.core.plan import OFFLOADS, Offload, level_at

__all__ = ["ACTIVATIONS", "STAGES", "Activations", "Stage", "Strategy", "placements"]

Stage = Literal[0, 1, 2, 3]
Activations = Literal["keep", "recompute", "host", "nvme"]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
ACTIVATIONS: tuple[Activations, ...] = ("keep", "recompute", "host", "nvme")


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a row of the estimate stands for.

    Attributes:
        stage: what is sharded over ranks: nothing (0), optimizer states (1), gradients too (2), parameters too (3).
        offload: what leaves the device, one of :data:`~zerograph.core.plan.OFFLOADS`, if the stage shards it.
        tier: where it goes.
        activations: kept; recomputed from one checkpoint per layer; or that, with the checkpoints in host memory or
            on NVMe.
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
                "offload something to host or nvme, or offload none and leave the tier on the device",
            )
        if self.tiles < 1:
            raise ConfigError(f"tiles must be at least 1, got {self.tiles}")

    def home(self, kind: Offload) -> Tier:
        """The tier that the optimizer states, the gradients or the parameters live on between steps."""
        return self.tier if OFFLOADS.index(kind) <= OFFLOADS.index(self.offload) else "device"

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
    plain: list[tuple[Stage, Offload, Tier]] = [(stage, "none", "device") for stage in STAGES]
    return tuple(plain) + tuple(
        (stage, offload, tier)
        for tier in tiers
        for level, offload in enumerate(OFFLOADS)
        for stage in STAGES
        if 0 < level <= stage
    )
