"""The holdings at one moment of a planned step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.machine import TIERS, Tier

START = -1
"""Stands for the moment before the first task."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The start of a task, once it has taken the memory it needs.

    Attributes:
        task: its index, -1 for the start of the step.
        time: seconds.
        levels: bytes per tier.
        holdings: the largest first, tier by tier.
    """

    task: int
    time: float
    levels: Mapping[Tier, int]
    holdings: tuple[Holding, ...]

    def unnamed(self, tier: Tier) -> int:
        """Bytes of ``tier`` that no holding explains."""
        return self.levels.get(tier, 0) - sum(h.bytes for h in self.holdings if h.tier == tier)


def moment(file: PlanFile, task: int) -> Moment:
    """The moment in which ``task`` has started; -1 for the start of the step."""
    time = 0.0 if task == START else file.forecast.spans[task].start
    held = [h for h in file.holdings if _held(file, h, task, time)]
    held.sort(key=lambda h: (TIERS.index(h.tier), -h.bytes))
    levels = {tier: _level(file, tier, task, time) for tier in TIERS if tier in file.forecast.memory}
    return Moment(task, time, levels, tuple(held))


def by_kind(holdings: Iterable[Holding]) -> list[tuple[str, int]]:
    """Each kind of memory with its bytes, the most first."""
    kinds: Counter[str] = Counter()
    for holding in holdings:
        kinds[holding.kind] += holding.bytes
    return kinds.most_common()


def _held(file: PlanFile, holding: Holding, task: int, time: float) -> bool:
    if task == START:
        return holding.first == START
    # Its own tasks count also where they take no time.
    return task in (holding.first, holding.last) or holding.held_at(time, file.forecast.spans)


def _level(file: PlanFile, tier: Tier, task: int, time: float) -> int:
    peak = file.forecast.peaks.get(tier)
    # Several tasks may start at one moment, of which the curve keeps the last level: the peak itself is exact.
    if peak is not None and peak.task == task:
        return peak.bytes
    if task == START:
        return sum(h.bytes for h in file.holdings if h.tier == tier and h.first == START)
    return next((level for at, level in reversed(file.forecast.memory[tier]) if at <= time), 0)


def find_task(file: PlanFile, text: str) -> int:
    """The task of that index, of that name, or the only one whose name has ``text`` in it.

    Raises:
        ConfigError: there is none, or more than one.
    """
    spans = file.forecast.spans
    if text.isdecimal():
        if int(text) < len(spans):
            return int(text)
        raise ConfigError(f"no task {text}: the plan has {len(spans)}", f"0 to {len(spans) - 1}, or a name")
    found = [s for s in spans if s.name == text] or [s for s in spans if text in s.name]
    if not found:
        raise ConfigError(f"no task is called {text!r}", "`zerograph show PLAN --by op` lists them")
    if len(found) > 1:
        names = ", ".join(f"{s.task} {s.name}" for s in found[:5]) + (", ..." if len(found) > 5 else "")
        raise ConfigError(f"{len(found)} tasks are called {text!r}: {names}", "give the index of one")
    return found[0].task
