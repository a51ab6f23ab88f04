"""The rows of ``zerograph show``: what a step's memory and time is made of, by layer, kind, tier or op."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from zerograph.cli.view.collapsing import collapse_rows, interleaved, skeleton
from zerograph.cli.view.moment import START, Moment, by_kind, moment
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.machine import TIERS, Tier
from zerograph.core.step import layer_of
from zerograph.core.timeline import Forecast, Span
from zerograph.core.units import format_bytes

By = Literal["layer", "kind", "tier", "op"]
BYS: tuple[By, ...] = get_args(By)
_SAME = 0.01
"""Share by which times of layers that are alike may differ."""


@dataclass(slots=True)
class Group:
    """One row.

    Attributes:
        name: of the layer, kind, tier or op.
        bytes: per tier, at the moment of that tier's peak; of an op, what it takes when it starts.
        tasks: how many there are.
        seconds: of its tasks, on all streams.
        measured: the same in a measured run; None where the run has none of its tasks.
        stream: of an op.
        source: of an op: the user's ``file:line``.
        why: the decision that put it here, and the reason.
    """

    name: str
    bytes: dict[Tier, int] = field(default_factory=dict)
    tasks: int = 0
    seconds: float = 0.0
    measured: float | None = None
    stream: str = ""
    source: str = ""
    why: str = ""

    def run(self, span: Span) -> None:
        """Count one of its tasks."""
        self.tasks += 1
        self.seconds += span.end - span.start

    def hold(self, holding: Holding) -> None:
        """Count what ``holding`` holds."""
        self.bytes[holding.tier] = self.bytes.get(holding.tier, 0) + holding.bytes


def grouped(file: PlanFile, by: By, measured: Forecast | None = None) -> list[list[Group]]:
    """The collapsed rows of ``file``, in the order of the step."""
    # Functions, so that only the rows that are asked for are made.
    makers: Mapping[By, Callable[[], list[Group]]] = {
        "layer": lambda: _by_layer(file, measured),
        "kind": lambda: _by_kind(file),
        "tier": lambda: _by_tier(file),
        "op": lambda: _by_op(file, measured),
    }
    return collapse_rows(makers[by](), lambda g: g.name, _alike)


def largest_rows(collapsed: Iterable[list[Group]], by: By, top: int) -> list[list[Group]]:
    """The ``top`` rows with the most memory (ops: the most time), largest first."""
    return sorted(collapsed, key=_time if by == "op" else _memory, reverse=True)[:top]


def peak_moments(file: PlanFile) -> dict[Tier, Moment]:
    """For each tier, what is held when it holds the most."""
    peaks = file.forecast.peaks
    return {tier: moment(file, peaks[tier].task) for tier in TIERS if tier in peaks}


def _by_layer(file: PlanFile, measured: Forecast | None) -> list[Group]:
    groups: dict[str, Group] = {}
    for span in file.forecast.spans:
        name = _layer(span)
        groups.setdefault(name, Group(name)).run(span)
    for holding in _held_at_peaks(file):
        name = _owner(file, holding)
        groups.setdefault(name, Group(name)).hold(holding)
    _lay_over(groups.values(), measured, _layer)
    reasons = _reasons(file)
    for group in groups.values():
        group.why = reasons.get(group.name, "")
    return list(groups.values())


def _layer(span: Span) -> str:
    """The layer that a task works for; of one outside of layers what it is called."""
    return layer_of(span.module) or span.module or span.name


def _owner(file: PlanFile, holding: Holding) -> str:
    """The layer of a holding; of one outside of layers the row of the task that made it, since its name is a node's."""
    if not holding.module and holding.first != START:
        made = file.forecast.spans[holding.first]
        return _layer(made)
    name = holding.module or holding.name
    return layer_of(name) or name


def _by_kind(file: PlanFile) -> list[Group]:
    groups: dict[str, Group] = {}
    for holding in _held_at_peaks(file):
        groups.setdefault(holding.kind, Group(holding.kind)).hold(holding)
    return sorted(groups.values(), key=lambda g: -sum(g.bytes.values()))


def _by_tier(file: PlanFile) -> list[Group]:
    groups = []
    for tier, at in peak_moments(file).items():
        kinds = by_kind(h for h in at.holdings if h.tier == tier)
        parts = [f"{kind} {format_bytes(size)}" for kind, size in kinds]
        if at.unnamed(tier):
            parts.append(f"not told apart {format_bytes(at.unnamed(tier))}")
        groups.append(Group(tier, {tier: file.forecast.peaks[tier].bytes}, why=", ".join(parts)))
    return groups


def _by_op(file: PlanFile, measured: Forecast | None) -> list[Group]:
    takes: dict[int, list[Holding]] = defaultdict(list)
    for holding in file.holdings:
        takes[holding.first].append(holding)
    reasons = _reasons(file)
    groups: dict[str, Group] = {}
    for span in file.forecast.spans:
        why = reasons.get(layer_of(span.module) or span.module, "")
        group = groups.setdefault(span.name, Group(span.name, stream=span.stream, source=span.source, why=why))
        group.run(span)
        for holding in takes[span.task]:
            group.hold(holding)
    _lay_over(groups.values(), measured, lambda span: span.name)
    return interleaved(groups.values(), lambda g: g.name)


def _held_at_peaks(file: PlanFile) -> list[Holding]:
    """Each tier's holdings at the moment of its peak."""
    return [h for tier, at in peak_moments(file).items() for h in at.holdings if h.tier == tier]


def _lay_over(groups: Iterable[Group], measured: Forecast | None, name: Callable[[Span], str]) -> None:
    if measured is None:
        return
    seconds: dict[str, float] = defaultdict(float)
    for span in measured.at_work():
        seconds[name(span)] += span.end - span.start
    for group in groups:
        group.measured = seconds.get(group.name)


def _reasons(file: PlanFile) -> dict[str, str]:
    """Layer -> the most important decision about it or what is in it, and how many others there are."""
    decisions: dict[str, list[str]] = defaultdict(list)
    for reason in file.reasons:
        text, texts = f"{reason.decision}: {reason.why}", decisions[layer_of(reason.subject) or reason.subject]
        if text not in texts:
            texts.append(text)
    return {
        layer: texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")
        for layer, texts in decisions.items()
    }


def _alike(a: Group, b: Group) -> bool:
    """Whether the rows say the same, source lines and numbers inside reasons aside."""
    same = a.bytes == b.bytes and a.stream == b.stream and a.tasks == b.tasks
    return same and math.isclose(a.seconds, b.seconds, rel_tol=_SAME) and skeleton(a.why) == skeleton(b.why)


def _memory(rows: list[Group]) -> float:
    return sum(sum(row.bytes.values()) for row in rows)


def _time(rows: list[Group]) -> float:
    return sum(row.seconds for row in rows)
