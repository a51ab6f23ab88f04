"""Why nothing fits: what is needed, what there is, on which tier, and which change would help how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from zerograph.core.machine import TIERS, Tier, is_disk, memory_name, offload_tier
from zerograph.core.units import format_bytes
from zerograph.planner.estimate.estimate import TILES, Question, Row
from zerograph.planner.estimate.preset import Need
from zerograph.planner.estimate.strategy import ACTIVATIONS, Strategy, placements


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change, the bytes that it takes off the short tier, and whether everything fits then."""

    change: str
    saves: int
    fits: bool

    def __str__(self) -> str:
        saved = f"{format_bytes(self.saves)} less, " if self.saves > 0 else ""
        return f"{self.change}: {saved}{'then it fits' if self.fits else 'not enough alone'}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """One row that does not fit: ``need`` and ``have`` bytes of the tier that is overrun most.

    Attributes:
        row: as it was tried.
        largest: what takes most of that tier.
        remedies: single changes that take bytes off it, those that make it fit first, then by bytes saved.
    """

    row: Row
    tier: Tier
    need: int
    have: int
    largest: Need
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        item = f"{self.largest.item} take {format_bytes(self.largest.bytes)} of it"
        place = f"{memory_name(self.tier)} per rank"
        need, have = format_bytes(self.need), format_bytes(self.have)
        return f"{self.row.strategy.name} needs {need} of {place}, has {have}; {item}"


def shortage(found: tuple[Row, ...]) -> Shortage | None:
    """The shortage of the row that is least over; None when a row fits."""
    if any(row.fits for row in found):
        return None
    row = min(found, key=lambda row: row.over)
    tier = row.short
    held = max((need for need in row.preset.needs if need.tier == tier), key=lambda need: need.bytes)
    return Shortage(row, tier, row.need[tier], row.have[tier], held, tuple(ranked(_remedies(row))))


def ranked(remedies: Iterable[Remedy]) -> list[Remedy]:
    """Those that help: first what alone is enough, then what saves the most."""
    helpful = (remedy for remedy in remedies if remedy.saves > 0 or remedy.fits)
    return sorted(helpful, key=lambda remedy: (not remedy.fits, -remedy.saves))


def _remedies(row: Row) -> Iterator[Remedy]:
    for change, question, strategy in _changes(row):
        after = Row(question, strategy)
        yield Remedy(change, row.need[row.short] - after.need[row.short], after.fits)
    over = {tier: row.need[tier] - row.have[tier] for tier in TIERS if row.need[tier] > row.have[tier]}
    for tier, size in over.items():
        more = ceil(size / (1 - row.question.reserve))
        yield Remedy(f"{format_bytes(more)} more on {tier} per rank", 0, len(over) == 1)


def _changes(row: Row) -> Iterator[tuple[str, Question, Strategy]]:
    """Every single change to the question or to the strategy."""
    question, strategy, training = row.question, row.strategy, row.question.training
    for name, value in (("batch", training.batch), ("seq", training.seq)):
        if value > 1:
            less = replace(training, **{name: value // 2})  # type: ignore[arg-type]  # both are ints
            yield f"{name} {value // 2} instead of {value}", replace(question, training=less), strategy
    yield f"{2 * question.world_size} ranks", replace(question, world_size=2 * question.world_size), strategy
    if training.attention == "whole":
        yield "fused attention", replace(question, training=replace(training, attention="fused")), strategy
    for other in _other_strategies(question, strategy):
        yield _difference(strategy, other), question, other


def _other_strategies(question: Question, strategy: Strategy) -> Iterator[Strategy]:
    for activations in ACTIVATIONS[1:]:
        if activations == "recompute" or activations in question.tiers:
            yield replace(strategy, activations=activations)
    yield from (replace(strategy, tiles=tiles) for tiles in TILES if tiles > strategy.tiles)
    for stage, offload, tier in placements(question.tiers):
        yield replace(strategy, stage=stage, offload=offload, tier=tier)


def _difference(old: Strategy, new: Strategy) -> str:
    if new.activations != old.activations:
        tier = offload_tier(new.activations)
        there = "" if tier == "device" else f" from checkpoints {'on' if is_disk(tier) else 'in'} {memory_name(tier)}"
        return f"{'recompute' if new.recomputes else 'keep'} activations{there}"
    return f"{new.tiles} tiles" if new.tiles != old.tiles else new.name
