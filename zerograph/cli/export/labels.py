"""How streams, tiers, bytes and seconds are called and coloured in every picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerograph.core.machine import TIERS, Tier
from zerograph.core.timeline import STREAMS, Forecast, Stream

STREAM_NAMES: Mapping[Stream, str] = {
    "compute": "compute",
    "gather": "gather",
    "reduce": "reduce",
    "h2d": "host → device",
    "d2h": "device → host",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "cpu_update": "CPU update",
}


@dataclass(frozen=True, slots=True)
class Colours:
    """Fill on a light page and on a dark one; text on them is white and near black: 4.5:1 or more in contrast."""

    light: str
    dark: str


STREAM_COLOURS: Mapping[Stream, Colours] = {
    "compute": Colours("#2a62c9", "#7fb0ff"),
    "gather": Colours("#a8560a", "#f5b267"),
    "reduce": Colours("#7b3fb8", "#c9a2f5"),
    "h2d": Colours("#0b7470", "#5fd0c5"),
    "d2h": Colours("#3b7319", "#9ed36a"),
    "nvme_read": Colours("#b3245f", "#f592b8"),
    "nvme_write": Colours("#8a3324", "#ec9c8a"),
    "cpu_update": Colours("#52606f", "#b3c0ce"),
}
TIER_COLOURS: Mapping[Tier, Colours] = {
    "device": Colours("#2a62c9", "#7fb0ff"),
    "host": Colours("#0b7470", "#5fd0c5"),
    "nvme": Colours("#b3245f", "#f592b8"),
}
REST = "rest"
"""Stands among kinds for what no holding explains."""
REST_NAME = "not told apart"
KIND_COLOURS: Mapping[str, tuple[str, str]] = {
    "param": ("#0072b2", "#fff"),
    "state": ("#56b4e9", "#10151b"),
    "gradient": ("#d55e00", "#10151b"),
    "gathered": ("#e69f00", "#10151b"),
    "activation": ("#009e73", "#10151b"),
    "input": ("#f0e442", "#10151b"),
    "temporary": ("#cc79a7", "#10151b"),
    REST: ("#545d67", "#fff"),
}
"""Fill, and text on it, on light pages and dark ones: the palette of Okabe and Ito, which people with any kind of
colour blindness tell apart (M. Okabe, K. Ito, Color Universal Design, 2008), and a dark grey."""


def streams_used(forecast: Forecast) -> tuple[Stream, ...]:
    """Streams on which anything runs, in the order in which they are shown."""
    used = {span.stream for span in forecast.spans}
    return tuple(stream for stream in STREAMS if stream in used)


def tiers_used(forecast: Forecast) -> tuple[Tier, ...]:
    """Tiers that hold anything, in the order in which they are shown."""
    return tuple(tier for tier in TIERS if forecast.memory.get(tier))


def picture_seconds(seconds: float) -> str:
    """``seconds`` with three significant digits and a unit: ``"4 ms"``, ``"1.52 s"``."""
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def _digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
