"""The rows of an estimate for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zerograph.cli.terminal import Cell
from zerograph.core.machine import TIERS
from zerograph.core.units import format_bytes
from zerograph.planner.estimate.estimate import Question, Row
from zerograph.planner.estimate.shortage import Shortage
from zerograph.planner.estimate.sizes import format_count

if TYPE_CHECKING:
    from zerograph.planner.search.largest_size import Budget, LargestSize

VERSION = 2


def cells(table: Iterable[Row], best: Row | None) -> list[list[Cell]]:
    """A row of text per row under a header, the fastest that fits marked with ``*`` and bold, those that do not dim."""
    header: list[Cell] = [(title, "bold") for title in _HEADER]
    body: list[list[Cell]] = [[(text, _style(row, best)) for text in _texts(row, row is best)] for row in table]
    return [header, *body]


_HEADER = ("", "strategy", "fits", "activations", "tiles", *TIERS, "seconds", "tokens/s", "bound by")
NUMBERS = frozenset(range(5, 10))
BELOW = frozenset({2, 3, 4, 5, 6, 7, 10})
"""Columns that stand below their rows on a terminal that is too narrow for all of them."""


def _style(row: Row, best: Row | None) -> str:
    return "bold green" if row is best else "" if row.fits else "dim"


def _texts(row: Row, best: bool) -> tuple[str, ...]:
    over = [tier for tier in TIERS if row.need[tier] > row.have[tier]]
    return (
        "*" if best else "",
        row.strategy.name,
        "yes" if row.fits else f"no: {', '.join(over)}",
        row.strategy.activations,
        str(row.strategy.tiles),
        *(f"{format_bytes(row.need[t])} of {format_bytes(row.have[t])}" if row.need[t] else "-" for t in TIERS),
        _digits(row.outcome.seconds),
        format_count(row.tokens_per_second),
        row.outcome.bound,
    )


def _digits(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 999.5 else f"{seconds:.0f}"


def as_data(
    model: str | None, question: Question, table: Iterable[Row], best: Row | None, missing: Shortage | None,
    what: str | None, value: int | None, traced: Mapping[int, tuple[LargestSize, Budget]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The data that ``--json`` prints; ``docs/guide/json.md`` describes every field."""
    return {
        "version": VERSION,
        "model": model,
        "size": asdict(question.size),
        "training": asdict(question.training),
        "machine": question.machine.name,
        "world_size": question.world_size,
        "reserve": question.reserve,
        "outside": question.machine.outside(question.world_size),
        "rows": [_row(row, row is best) for row in table],
        "shortage": _shortage(missing) if missing else None,
        "largest": {"what": what, "value": value} if what else None,
        "traced": [_solved(stage, *solved) for stage, solved in traced.items()] if traced else None,
    }


def _solved(stage: int, found: LargestSize, budget: Budget) -> dict[str, Any]:
    have = budget if isinstance(budget, int) else budget[found.tier]
    need = {"largest": found.held, "next": found.need}
    data = {"stage": stage, "value": found.value, "tier": found.tier, "need": need, "have": have}
    return {**data, "limit": found.limit or None}


def _row(row: Row, best: bool) -> dict[str, Any]:
    return {
        **asdict(row.strategy),
        "fits": row.fits,
        "fastest": best,
        "need": dict(row.need),
        "have": dict(row.have),
        "items": [asdict(need) for need in row.preset.needs],
        "seconds": row.outcome.seconds,
        "tokens_per_second": row.tokens_per_second,
        "passes": dict(row.outcome.passes),
        "update": dict(row.outcome.update),
    }


def _shortage(missing: Shortage) -> dict[str, Any]:
    return {
        # The name that version 1 of this output has for it.
        "choice": asdict(missing.row.strategy),
        "tier": missing.tier,
        "need": missing.need,
        "have": missing.have,
        "largest": asdict(missing.largest),
        "knobs": [asdict(remedy) for remedy in missing.remedies],
    }
