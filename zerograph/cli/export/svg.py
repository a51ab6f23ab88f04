"""The timeline of streams over the memory of each tier, as a picture for a README or a slide.

It follows the reader's light or dark theme by itself, and needs no font or script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from zerograph.cli.export.labels import (
    STREAM_COLOURS,
    STREAM_NAMES,
    TIER_COLOURS,
    picture_seconds,
    streams_used,
    tiers_used,
)
from zerograph.cli.export.picture import Bar, bars, byte_ticks, memory_top, peak_bytes, peak_time, time_ticks
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.machine import TIER_NAMES, Tier
from zerograph.core.timeline import Forecast, Stream
from zerograph.core.units import format_bytes, format_ranks

WIDTH, LEFT, RIGHT = 900, 118, 20
PLOT = WIDTH - LEFT - RIGHT
HEAD, AXIS, LANE, BAR, MEMORY, TIER_HEAD, FOOT, PANEL_HEAD = 58, 24, 26, 20, 84, 34, 18, 28
CHARACTER = 6.4
"""Width of a character of a label, in pixels, rounded up."""
ELLIPSIS = "…"


def write(file: PlanFile, path: Path, beside: Beside | None = None) -> None:
    """Write the picture, 900 pixels wide; what a run measured is drawn below the forecast, on the same scale of time.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.write_text(picture(file, beside), encoding="utf-8")


def picture(file: PlanFile, beside: Beside | None = None) -> str:
    """The SVG document."""
    forecast, summary = file.forecast, _summary(file, beside)
    shown = [("forecast" if beside else "", file)]
    if beside is not None:
        shown.append(("measured", replace(file, forecast=beside.measured)))
    seconds = max(part.forecast.seconds for _, part in shown)
    panels, bottom = list[str](), HEAD + AXIS
    for heading, part in shown:
        drawn, bottom = _panel(heading, part, bottom, seconds)
        panels += drawn
    height = bottom + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title about">',
        f'<title id="title">{_text(f"One training step of {file.model}")}</title>',
        f'<desc id="about">{_text(summary)}</desc>',
        f"<style>{_style()}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="head" x="20" y="28">{_text(_shortened(file.model, 90))}</text>',
        f'<text class="quiet" x="20" y="46">{_text(summary)}</text>',
        *_axis(seconds, height - FOOT),
        *panels,
    ]
    if not forecast.spans:
        parts.append(f'<text class="quiet" x="{LEFT}" y="{HEAD + AXIS + 16}">This plan has no instructions.</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(heading: str, file: PlanFile, top: int, seconds: float) -> tuple[list[str], int]:
    """Streams and tiers of one step under ``top``, and where they end; ``seconds`` are as wide as the plot."""
    streams, tiers = streams_used(file.forecast), tiers_used(file.forecast)
    parts = []
    if heading:
        top += PANEL_HEAD
        parts.append(f'<text class="part" x="20" y="{top - 9}">{heading}</text>')
    for row, stream in enumerate(streams):
        parts += _lane(file.forecast, stream, top + row * LANE, seconds)
    below = top + LANE * max(1, len(streams))
    for row, tier in enumerate(tiers):
        parts += _memory(file, tier, below + row * (TIER_HEAD + MEMORY) + TIER_HEAD, seconds)
    return parts, below + len(tiers) * (TIER_HEAD + MEMORY)


def _summary(file: PlanFile, beside: Beside | None) -> str:
    forecast, plan = file.forecast, file.plan
    ranks = format_ranks(plan.world_size, plan.replicas)
    facts = [f"stage {plan.stage}", ranks, file.machine.name, f"step {picture_seconds(forecast.seconds)}"]
    if beside is not None:
        facts.append(f"re-timed {picture_seconds(beside.retimed.seconds)}")
        facts.append(f"measured {picture_seconds(beside.measured.seconds)}")
    if forecast.exposed_communication:
        facts.append(f"exposed communication {picture_seconds(forecast.exposed_communication)}")
    return " · ".join(facts)


def _style() -> str:
    def rules(theme: str) -> str:
        streams = "".join(f".{s}{{fill:{getattr(c, theme)}}}" for s, c in STREAM_COLOURS.items())
        tiers = "".join(
            f".tier-{t}{{fill:{getattr(c, theme)}}}.line-{t}{{stroke:{getattr(c, theme)}}}"
            for t, c in TIER_COLOURS.items()
        )
        return streams + tiers

    return (
        "text{font:11px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#1c2430}"
        ".head{font-size:15px;font-weight:600}.part{font-weight:600}.quiet{fill:#566270}.end{text-anchor:end}.middle{text-anchor:middle}"
        ".on{fill:#fff;font-size:10.5px}.page{fill:#fff;stroke:#d5dbe1}.track{fill:#f0f3f6}.grid{stroke:#dfe4e9}"
        ".area{fill-opacity:.18}.line{fill:none;stroke-width:1.5}"
        ".budget{stroke:#c22f2f;stroke-width:1.5;stroke-dasharray:6 4}"
        ".over{fill:#c22f2f}.peak{stroke:#fff;stroke-width:1.5}"
        + rules("light")
        + "@media(prefers-color-scheme:dark){text{fill:#e4e9ee}.quiet{fill:#9ba7b4}.on{fill:#10151b}"
        ".page{fill:#12171d;stroke:#2d3742}.track{fill:#1b222a}.grid{stroke:#2b343e}.budget{stroke:#ff8a80}"
        ".over{fill:#ff8a80}.peak{stroke:#12171d}" + rules("dark") + "}"
    )


def _axis(seconds: float, bottom: int) -> Iterator[str]:
    for tick in time_ticks(seconds, 8):
        x = _x(tick, seconds)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD + AXIS - 4}" y2="{bottom}"/>'
        yield f'<text class="quiet middle" x="{x:.1f}" y="{HEAD + AXIS - 9}">{picture_seconds(tick)}</text>'


def _lane(forecast: Forecast, stream: Stream, top: int, seconds: float) -> Iterator[str]:
    middle = top + BAR / 2 + 4
    yield f'<text class="end" x="{LEFT - 10}" y="{middle:.1f}">{STREAM_NAMES[stream]}</text>'
    yield f'<rect class="track" x="{LEFT}" y="{top}" width="{PLOT}" height="{BAR}" rx="3"/>'
    mine = (span for span in forecast.spans if span.stream == stream)
    for bar in bars(mine, 1.5 * seconds / PLOT):
        x = _x(bar.start, seconds)
        width = max(0.5, _x(bar.end, seconds) - x)
        yield (
            f'<rect class="{stream}" x="{x:.2f}" y="{top}" width="{max(0.5, width - 0.6):.2f}" height="{BAR}" '
            f'rx="{min(3.0, width / 4):.1f}"><title>{_text(_tooltip(bar))}</title></rect>'
        )
        name = _label(bar.spans[0].name, bar.spans[0].module, width) if len(bar.spans) == 1 else ""
        if name:
            yield f'<text class="on middle" x="{x + width / 2:.1f}" y="{middle:.1f}">{_text(name)}</text>'


def _tooltip(bar: Bar) -> str:
    what = bar.spans[0].name if len(bar.spans) == 1 else f"{len(bar.spans)} instructions"
    return f"{what}, {picture_seconds(bar.end - bar.start)} from {picture_seconds(bar.start)}"


def _label(name: str, module: str, width: float) -> str:
    """As much of the name as fits: all of it, or the module without the verb, or the module's last parts."""
    parts = module.split(".")
    texts = [name, *(".".join(parts[i:]) for i in range(len(parts)))]
    return next((text for text in texts if len(text) * CHARACTER + 6 <= width), "")


def _memory(file: PlanFile, tier: Tier, top: int, seconds: float) -> Iterator[str]:
    forecast, budget = file.forecast, file.budget.get(tier, 0)
    most, peak = memory_top(forecast, tier, budget), peak_bytes(forecast, tier)
    bottom = top + MEMORY - 12

    def y(size: int) -> float:
        return bottom - size / most * (bottom - top)

    yield f'<text x="{LEFT}" y="{top - 8}">{_memory_title(file, tier, budget)}</text>'
    for tick in [0, *byte_ticks(most)]:
        yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text class="quiet end" x="{LEFT - 10}" y="{y(tick) + 4:.1f}">{format_bytes(tick)}</text>'
    points = [(_x(min(time, seconds), seconds), y(size)) for time, size in forecast.memory[tier]]
    end = max(_x(forecast.seconds, seconds), points[-1][0])
    steps = f"V{points[0][1]:.1f}" + "".join(f"H{a:.1f}V{b:.1f}" for a, b in points[1:]) + f"H{end:.1f}"
    yield f'<path class="area tier-{tier}" d="M{LEFT} {bottom}{steps}V{bottom}Z"/>'
    yield f'<path class="line line-{tier}" d="M{LEFT} {points[0][1]:.1f}{steps}"/>'
    if budget and budget <= most:
        yield f'<line class="budget" x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y(budget):.1f}" y2="{y(budget):.1f}"/>'
    x = _x(peak_time(forecast, tier), seconds)
    colour = "over" if 0 < budget < peak else f"tier-{tier}"
    yield f'<circle class="peak {colour}" cx="{x:.1f}" cy="{y(peak):.1f}" r="5"/>'


def _memory_title(file: PlanFile, tier: Tier, budget: int) -> str:
    peak = file.forecast.peaks.get(tier)
    size = peak_bytes(file.forecast, tier)
    at = f" at {_shortened(peak.name, 44)}" if peak else ""
    name = TIER_NAMES[tier]
    text = f'<tspan font-weight="600">{name[0].upper()}{name[1:]} memory</tspan>'
    text += f'<tspan class="tier-{tier}" dx="10">●</tspan>'
    text += f'<tspan class="quiet"> peak {format_bytes(size)}{_text(at)}</tspan>'
    if budget:
        line = "– –" if budget <= memory_top(file.forecast, tier, budget) else "&#8203;"  # dx needs a text
        over = "over" if size > budget else "quiet"
        text += f'<tspan class="over" dx="10">{line}</tspan>'
        text += f'<tspan class="{over}"> budget {format_bytes(budget)}, {size / budget:.0%} used</tspan>'
    return text


def _x(time: float, seconds: float) -> float:
    return LEFT + (time / seconds if seconds else 0.0) * PLOT


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most // 2] + ELLIPSIS + text[-(most - most // 2 - 1) :]


def _text(text: str) -> str:
    """Escaped, and without the control characters that no XML may hold."""
    return escape("".join(c if c.isprintable() else " " for c in text))
