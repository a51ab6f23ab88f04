"""The bytes of a tier, kind by kind, over a step: the parts of its memory curve."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import Tier


def levels(file: PlanFile, tier: Tier) -> tuple[dict[str, list[int]], list[int]]:
    """Bytes of each kind of memory at each moment of the tier's curve, and those that no holding explains.

    All of them add up to the curve. A forecast is made of its holdings, so there nothing is left over; files made
    otherwise may tell of a part only, or of nothing.
    """
    spans, curve = file.forecast.spans, file.forecast.memory[tier]
    times = [time for time, _ in curve]
    changes: dict[str, list[int]] = {}
    for holding in file.holdings:
        if holding.tier != tier or not holding.bytes:
            continue
        change = changes.setdefault(holding.kind, [0] * (len(times) + 1))
        change[0 if holding.first == -1 else bisect_left(times, spans[holding.first].start)] += holding.bytes
        if holding.last != -1:
            change[bisect_left(times, spans[holding.last].end)] -= holding.bytes
    kinds = {kind: list(accumulate(change[:-1])) for kind, change in changes.items()}
    named = [sum(at) for at in zip(*kinds.values(), strict=True)] or [0] * len(times)
    return kinds, [level - part for (_, level), part in zip(curve, named, strict=True)]
