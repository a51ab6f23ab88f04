"""Collapsed rows and moments as tables for people and as data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zerograph.cli.terminal import Cell
from zerograph.cli.view.collapsing import collapse_rows, collapsed_name, interleaved, short_source
from zerograph.cli.view.groups import By, Group, largest_rows
from zerograph.cli.view.moment import START, Moment
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.machine import TIERS, Tier
from zerograph.core.units import format_bytes, format_seconds

_WHY = {"tier": "what it holds"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with a header, the columns that are numbers, those that may stand below their rows, and how many smaller
    rows are left out."""

    rows: list[list[Cell]]
    numbers: frozenset[int]
    below: frozenset[int]
    left_out: int = 0


def group_data(collapsed: Sequence[list[Group]]) -> list[dict[str, Any]]:
    """Collapsed rows as data: what is said of a row is true of each of the ``count`` alike."""
    return [
        {"last": rows[-1].name, "count": len(rows), **asdict(rows[0]), "measured": _measured(rows)}
        for rows in collapsed
    ]


def group_table(every: Sequence[list[Group]], by: By, top: int | None = None) -> Table:
    """Collapsed rows, only the ``top`` largest when given; columns that are empty throughout are left out."""
    collapsed = every if top is None else largest_rows(every, by, top)
    firsts = [rows[0] for rows in collapsed]
    columns: list[tuple[str, Literal["name", "number", "note"], list[str]]] = [
        (by, "name", [_name(rows) for rows in collapsed]),
        *((tier, "number", [_bytes(row.bytes.get(tier)) for row in firsts]) for tier in TIERS),
        ("time", "number", [_seconds(row.seconds) for row in firsts]),
        ("measured", "number", [_seconds(_measured(rows)) for rows in collapsed]),
        ("ratio", "number", [_ratio(rows[0].seconds, _measured(rows)) for rows in collapsed]),
        ("stream", "note", [row.stream + (f" x{row.tasks}" if row.stream and row.tasks > 1 else "") for row in firsts]),
        ("source", "note", [_source([row.source for row in rows]) for rows in collapsed]),
        (_WHY.get(by, "why it is here"), "note", [row.why for row in firsts]),
    ]
    columns = [column for column in columns if any(column[2])]
    header: list[Cell] = [(title, "bold") for title, _, _ in columns]
    cells: list[list[Cell]] = [list(row) for row in zip(*(cells for _, _, cells in columns), strict=True)]
    roles = [role for _, role, _ in columns]
    return Table([header, *cells], _places(roles, "number"), _places(roles, "note"), len(every) - len(collapsed))


def _places(roles: Sequence[str], role: str) -> frozenset[int]:
    return frozenset(i for i, other in enumerate(roles) if other == role)


def moment_data(file: PlanFile, at: Moment) -> dict[str, Any]:
    """A moment as data."""
    return {
        "task": at.task,
        "name": _task(file, at.task),
        "time": at.time,
        "levels": dict(at.levels),
        "not_told_apart": {tier: at.unnamed(tier) for tier in at.levels},
        "holdings": [asdict(holding) for holding in at.holdings],
    }


def moment_lines(file: PlanFile, at: Moment) -> list[Cell]:
    """The task that runs at that moment, and the levels of the tiers."""
    span = None if at.task == START else file.forecast.spans[at.task]
    what = _task(file, START) if span is None else f"task {span.task}, {span.name}, on {span.stream}"
    place = "" if span is None else " ".join(text for text in (span.module, span.source) if text)
    first = f"{what}{f' ({place})' if place else ''}, {format_seconds(at.time)} into the step"
    return [(first, "bold"), *(_level(file, at, tier) for tier in TIERS if tier in at.levels)]


def _level(file: PlanFile, at: Moment, tier: Tier) -> str:
    left = at.unnamed(tier)
    rest = f", {format_bytes(left)} of it not told apart" if left else ""
    budget = f" of {format_bytes(file.budget[tier])}" if tier in file.budget else ""
    return f"{tier} holds {format_bytes(at.levels[tier])}{budget}{rest}"


def moment_table(file: PlanFile, at: Moment, top: int | None = None) -> Table:
    """The holdings, alike layers collapsed, each tier's largest first; only the ``top`` largest of all when given."""
    collapsed = collapse_rows(interleaved(at.holdings, _identity), _identity, _alike)
    collapsed.sort(key=_size, reverse=True)
    shown = sorted(collapsed[:top], key=lambda rows: TIERS.index(rows[0].tier))
    header: list[Cell] = [(title, "bold") for title in ("tier", "bytes", "kind", "what", "held", "source")]
    cells = [_holding(file, rows) for rows in shown]
    return Table([header, *cells], frozenset({1}), frozenset({4, 5}), len(collapsed) - len(shown))


def _holding(file: PlanFile, rows: list[Holding]) -> list[Cell]:
    first, last = rows[0], rows[-1]
    return [
        first.tier,
        format_bytes(first.bytes),
        first.kind,
        collapsed_name(first.name, last.name, len(rows)),
        _while(file, first) if first == last else "",
        _source([holding.source for holding in rows]),
    ]


def _while(file: PlanFile, holding: Holding) -> str:
    """From which task to which something is held."""
    if holding.first == holding.last == START:
        return "always"
    begin = "the start" if holding.first == START else _task(file, holding.first)
    end = "the end" if holding.last == START else _task(file, holding.last)
    return f"{begin} to {end}"


def _size(rows: list[Holding]) -> int:
    return sum(holding.bytes for holding in rows)


def _identity(holding: Holding) -> str:
    return holding.name


def _alike(a: Holding, b: Holding) -> bool:
    return (a.tier, a.kind, a.bytes) == (b.tier, b.kind, b.bytes)


def _task(file: PlanFile, task: int) -> str:
    return "the start of the step" if task == START else file.forecast.spans[task].name


def _name(rows: list[Group]) -> str:
    return collapsed_name(rows[0].name, rows[-1].name, len(rows))


def _source(sources: Sequence[str]) -> str:
    """The line that all come from, or the first one and that there are others."""
    return short_source(sources[0]) + ("" if len(set(sources)) == 1 else ", ...")


def _measured(rows: list[Group]) -> float | None:
    """Mean of those that were measured."""
    times = [row.measured for row in rows if row.measured is not None]
    return sum(times) / len(times) if times else None


def _bytes(size: int | None) -> str:
    return format_bytes(size) if size else ""


def _seconds(seconds: float | None) -> str:
    return format_seconds(seconds) if seconds else ""


def _ratio(forecast: float, measured: float | None) -> str:
    return f"x{measured / forecast:.2f}" if forecast and measured is not None else ""
