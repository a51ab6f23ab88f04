"""The data that the page's scripts read: a plan file as compact JSON, by column, and names as places in ``texts``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from zerograph.cli.export.labels import REST, REST_NAME, STREAM_NAMES, streams_used, tiers_used
from zerograph.cli.export.modules import Module, module_tree, most_held
from zerograph.cli.export.picture import memory_top, peak_bytes, peak_time
from zerograph.cli.view.levels import levels
from zerograph.cli.view.moment import by_kind, moment
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.machine import TIER_NAMES, Tier
from zerograph.core.step import KIND_NAMES
from zerograph.core.timeline import Forecast

NANOSECOND_DIGITS = 9
MEASURED = "measured-"
"""The prefix of the keys of a run's streams and tiers."""
_NOTHING = Forecast((), {}, {})
FEW_REASONS = 2
"""So many fit into a row of a module."""


def page_data(file: PlanFile, beside: Beside | None = None) -> dict[str, Any]:
    """Plain data for ``JSON.parse``. Measurements of a run are further streams and tiers, below the plan's."""
    texts: dict[str, int] = {}
    column = partial(_column, texts)
    forecast, measured = file.forecast, beside.measured if beside is not None else _NOTHING
    ran = replace(file, forecast=measured, holdings=())  # a run tells how much is held, and not what
    spans = [*forecast.spans, *(replace(s, after=()) for s in measured.spans)]
    data = {
        "seconds": _rounded(max(forecast.seconds, measured.seconds)),
        "planned": len(forecast.spans),
        "streams": [
            *({"key": s, "name": STREAM_NAMES[s]} for s in streams_used(forecast)),
            *({"key": MEASURED + s, "name": f"{STREAM_NAMES[s]}, run"} for s in streams_used(measured)),
        ],
        "tiers": [
            *(_tier(file, tier) for tier in tiers_used(forecast)),
            *(_measured_tier(ran, tier, len(forecast.spans)) for tier in tiers_used(measured)),
        ],
        "tierNames": dict(TIER_NAMES),
        "kindNames": {str(kind): name for kind, name in (*KIND_NAMES.items(), (REST, REST_NAME))},
        "spans": {
            "name": column([s.name for s in spans]),
            "stream": column([*(s.stream for s in forecast.spans), *(MEASURED + s.stream for s in measured.spans)]),
            "module": column([s.module for s in spans]),
            "source": column([s.source for s in spans]),
            "start": [_rounded(s.start) for s in spans],
            "end": [_rounded(s.end) for s in spans],
            "after": [list(s.after) for s in spans],
        },
        "critical": list(forecast.critical_path),
        "holdings": {
            "name": column([h.name for h in file.holdings]),
            "kind": column([h.kind for h in file.holdings]),
            "tier": column([h.tier for h in file.holdings]),
            "bytes": [h.bytes for h in file.holdings],
            "first": [h.first for h in file.holdings],
            "last": [h.last for h in file.holdings],
            "module": column([h.module for h in file.holdings]),
            "source": column([h.source for h in file.holdings]),
        },
        "modules": [_row(module, len(forecast.spans), texts) for module in module_tree(file)],
        "reasons": [[r.subject, r.decision, r.why] for r in file.reasons],
        "notCounted": list(forecast.not_counted),
    }
    return {**data, "texts": list(texts)}


def _column(texts: dict[str, int], names: Iterable[str]) -> list[int]:
    """The place of each name in ``texts``, which has every text once and takes up those that are new."""
    return [texts.setdefault(name, len(texts)) for name in names]


def _tier(file: PlanFile, tier: Tier) -> dict[str, Any]:
    forecast, budget = file.forecast, file.budget.get(tier, 0)
    peak = forecast.peaks.get(tier)
    return {
        "key": tier,
        "name": TIER_NAMES[tier],
        "times": [_rounded(time) for time, _ in forecast.memory[tier]],
        "bytes": [size for _, size in forecast.memory[tier]],
        "kinds": _kinds(file, tier),
        "budget": budget,
        "top": memory_top(forecast, tier, budget),
        "peak": {
            "bytes": peak_bytes(forecast, tier),
            "time": _rounded(peak_time(forecast, tier)),
            "task": peak.task if peak else -1,
            "name": peak.name if peak else "",
        },
    }


def _kinds(file: PlanFile, tier: Tier) -> list[dict[str, Any]]:
    """Each kind of memory, the lowest of the stack first: its level where it changes, and at the peak.

    Empty where nothing is known of the tier's memory but how much it is.
    """
    kinds, rest = levels(file, tier)
    peak = file.forecast.peaks.get(tier)
    then = moment(file, peak.task) if peak is not None else None
    held = dict(by_kind(h for h in then.holdings if h.tier == tier)) if then is not None else {}
    if kinds and any(rest):
        kinds[REST], held[REST] = rest, then.unnamed(tier) if then is not None else 0
    found = []
    for key in (*KIND_NAMES, REST):
        if key in kinds:
            level = kinds[key]
            at = [i for i in range(len(level)) if i == 0 or level[i] != level[i - 1]]
            found.append({"key": key, "at": at, "bytes": [level[i] for i in at], "peak": held.get(key, 0)})
    return found


def _measured_tier(ran: PlanFile, tier: Tier, before: int) -> dict[str, Any]:
    """A tier of a run, whose tasks stand after the ``before`` tasks of the plan."""
    found = _tier(ran, tier)
    peak = {**found["peak"], "task": found["peak"]["task"] + before if found["peak"]["task"] >= 0 else -1}
    return {**found, "key": MEASURED + tier, "name": f"measured {TIER_NAMES[tier]}", "peak": peak}


def _row(module: Module, tasks: int, texts: dict[str, int]) -> dict[str, Any]:
    compute, communication, other = module.seconds()
    label, source, why = _column(texts, (module.label, module.source(), _why(module)))
    row: dict[str, Any] = {
        "label": label,
        "paths": _column(texts, module.paths),
        "seconds": [_rounded(compute), _rounded(communication), _rounded(other)],
        "bytes": most_held(module.all_holdings(), tasks),
        "source": source,
        "why": why,
    }
    if module.children:
        row["children"] = [_row(child, tasks, texts) for child in module.children]
    return row


def _why(module: Module) -> str:
    """The decisions about it, or about all of the repeated layers that it stands for."""
    layers = module.children if len(module.paths) > 1 else []
    reasons = [r for part in (module, *layers) for r in part.reasons]
    different = list(dict.fromkeys(f"{r.decision}: {r.why}" for r in reasons))
    if len(different) > FEW_REASONS:
        different = list(dict.fromkeys(r.decision for r in reasons))  # why is printed further down, of each
    return " · ".join(different)


def _rounded(seconds: float) -> float:
    return round(seconds, NANOSECOND_DIGITS)
