"""Does it fit, and how fast is it: one row per ZeRO stage and offload choice, from sizes alone.

Each row is the fastest that fits among the ways to treat activations, each in the fewest tiles that fit; where none
fits, the one that is least over. Every row is a plan that is simulated (:mod:`zerograph.planner.estimate.preset`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from zerograph.core.errors import ConfigError
from zerograph.core.machine import Machine, OffloadTier, Tier
from zerograph.core.plan import Offload
from zerograph.planner.estimate.preset import Outcome, Preset
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.strategy import Activations, Stage, Strategy, placements
from zerograph.planner.estimate.training import Training
from zerograph.planner.search.constraints import open_tiers
from zerograph.planner.search.search_space import overrun

TILES = (1, 8, 64)
RESERVE = 0.06
"""Share of every tier that is left alone. On a device: communicators and workspaces of libraries that are made during
training, fragmentation, and what forecasts miss; the context too where the machine is only described. Elsewhere: the
system's own memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question that an estimate answers.

    Attributes:
        size, training, world_size, machine: what is trained, how, on how many ranks of which machine.
        stage, offload, tier, activations, tiles: fixed where they are not None; otherwise every value is tried.
        reserve: share of every tier that must stay free.
    """

    size: ModelSize
    training: Training
    machine: Machine
    world_size: int = 1
    stage: Stage | None = None
    offload: Offload | None = None
    tier: Tier | None = None
    activations: Activations | None = None
    tiles: int | None = None
    reserve: float = RESERVE

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world size must be at least 1, got {self.world_size}")
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"reserve must be from 0 to below 1, got {self.reserve}", "0.06 leaves 6% free")

    @property
    def have(self) -> dict[Tier, int]:
        """Bytes per tier that a rank may use, after the reserve."""
        return self.machine.budget(self.world_size, self.reserve)

    @property
    def tiers(self) -> tuple[OffloadTier, ...]:
        """The tiers beside the device that exist."""
        return open_tiers(self.machine, self.world_size, "auto", None)

    def groups(self) -> Iterator[tuple[Strategy, ...]]:
        """The strategies of every row: ways to treat activations, least work first, in the fewest tiles."""
        for stage, offload, tier in placements(self.tiers):
            wanted = ((self.stage, stage), (self.offload, offload), (self.tier, tier))
            if all(fixed is None or fixed == value for fixed, value in wanted):
                tiles = self.tiles or TILES[0]
                yield tuple(Strategy(stage, offload, tier, how, tiles) for how in self._activations())

    def _activations(self) -> tuple[Activations, ...]:
        if self.activations:
            return (self.activations,)
        return ("keep", "recompute", *self.tiers)


@dataclass(frozen=True)
class Row:
    """One strategy: what it needs and has on every tier, and how long a step takes if it fits."""

    question: Question
    strategy: Strategy

    @cached_property
    def preset(self) -> Preset:
        """Its plan."""
        asked = self.question
        return Preset(asked.size, asked.training, asked.machine, asked.world_size, self.strategy)

    @cached_property
    def outcome(self) -> Outcome:
        """Its step, simulated."""
        return self.preset.outcome

    @cached_property
    def need(self) -> Mapping[Tier, int]:
        """Bytes per tier."""
        return self.outcome.peaks

    @cached_property
    def have(self) -> Mapping[Tier, int]:
        """Bytes per tier that may be used."""
        return self.question.have

    @property
    def fits(self) -> bool:
        """Whether no tier is overrun."""
        return self.held_over <= 0 and self.over <= 0

    @property
    def over(self) -> float:
        """By what share of its capacity the fullest tier is overrun; 0 or less when everything fits."""
        return overrun(self.need.values(), self.have.values())[0]

    @property
    def short(self) -> Tier:
        """The fullest tier."""
        return overrun(self.need.values(), self.have.values())[2]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        training = self.question.training
        return training.tokens * training.accumulate * self.question.world_size / self.outcome.seconds

    @cached_property
    def held_over(self) -> float:
        """By what share a tier is overrun by what is held between steps alone, which needs no simulation."""
        return overrun(self.preset.held.values(), self.have.values())[0]

    def tiled(self) -> Row:
        """The row in the fewest tiles that fit, or that help most where none do; in as many as were asked for."""
        best = self
        if self.question.tiles or self.held_over > 0 or self.fits:
            return self
        for tiles in TILES[1:]:
            row = replace(self, strategy=replace(self.strategy, tiles=tiles))
            if row.fits or row.over >= best.over:
                return row if row.fits else best
            best = row
        return best


def estimate_rows(question: Question) -> tuple[Row, ...]:
    """A row per stage and offload choice that ``question`` leaves open.

    Raises:
        ConfigError: it leaves none open, for example parameters offloaded at stage 2.
    """
    found = tuple(_best([Row(question, strategy).tiled() for strategy in group]) for group in question.groups())
    if not found:
        asked = {"stage": question.stage, "offload": question.offload, "tier": question.tier}
        given = [f"{name} {value}" for name, value in asked.items() if value is not None]
        raise ConfigError(
            f"no row has {' and '.join(given)} on {question.machine.name}",
            "optimizer states can leave from stage 1, gradients from 2, parameters from 3; a CPU has no host tier",
        )
    return found


def fastest(found: tuple[Row, ...]) -> Row | None:
    """The row with the shortest step among those that fit; the first of equals, which is the lower stage."""
    return min((row for row in found if row.fits), key=lambda row: row.outcome.seconds, default=None)


def _best(strategies: list[Row]) -> Row:
    return fastest(tuple(strategies)) or min(strategies, key=lambda row: row.over)
