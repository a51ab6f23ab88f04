"""One page that shows a plan: streams over memory, what every instruction holds, modules, reasons. No network at all.

The page is ``page/page.html`` with the styles, the scripts and the plan's data put in. A policy in it forbids every
request and every script but that one, so that no name in a plan can make the browser do anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from zerograph.cli.export.labels import KIND_COLOURS, STREAM_COLOURS, TIER_COLOURS, picture_seconds, tiers_used
from zerograph.cli.export.page_data import MEASURED, page_data
from zerograph.cli.export.picture import peak_bytes
from zerograph.cli.view.summary import micro_batches, of_peak
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.machine import TIER_NAMES
from zerograph.core.units import counted, format_bytes, format_ranks

SCRIPTS = ("base.js", "view.js", "timeline.js", "instruction.js", "tables.js", "main.js")
"""Put together in this order."""


def write(file: PlanFile, path: Path, beside: Beside | None = None) -> None:
    """Write the page; what a run measured stands below the plan's streams and tiers, on the same scale of time.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.write_text(page(file, beside), encoding="utf-8")


def page(file: PlanFile, beside: Beside | None = None) -> str:
    """The HTML document."""
    script = '"use strict";\n(() => {\n' + "\n".join(_part(name) for name in SCRIPTS) + "})();\n"
    return _filled(
        _part("page.html"),
        {
            "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'",
            "title": escape(file.model),
            "facts": escape(_facts(file)),
            "tiles": "\n".join((*_tiles(file), *_measured_tiles(file, beside))),
            "style": _colours() + _part("page.css"),
            "data": _embedded(page_data(file, beside)),
            "script": script,
        },
    )


def _part(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Every ``{{name}}`` replaced, in one go: what stands in a value is left alone."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _hash(script: str) -> str:
    """How a content security policy names an inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _colours() -> str:
    def variables(theme: str) -> str:
        streams = {str(name): getattr(colours, theme) for name, colours in STREAM_COLOURS.items()}
        tiers = {str(name): getattr(colours, theme) for name, colours in TIER_COLOURS.items()}
        found = {f"{run}{name}": colour for run in ("", MEASURED) for name, colour in streams.items()}
        found |= {f"tier-{run}{name}": colour for run in ("", MEASURED) for name, colour in tiers.items()}
        return "".join(f"--{name}:{colour};" for name, colour in found.items())

    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{variables('dark')}}}}}"
    kinds = "".join(f"--kind-{kind}:{fill};--on-{kind}:{ink};" for kind, (fill, ink) in KIND_COLOURS.items())
    return f":root{{{variables('light')}{kinds}}}\n{dark}\n"


def _facts(file: PlanFile) -> str:
    plan = file.plan
    ranks, buckets = format_ranks(plan.world_size, plan.replicas), counted(len(plan.buckets), "bucket")
    return f"stage {plan.stage} · {ranks} · {file.machine.title} · {buckets} · plan {file.digest}"


def _tiles(file: PlanFile) -> list[str]:
    forecast = file.forecast
    exposed = forecast.exposed_communication
    share = f"{exposed / forecast.seconds:.0%} of the step" if forecast.seconds else ""
    shown = f"{len(forecast.spans)} instructions" if file.micro_batches == 1 else f"{micro_batches(file)}, shown here"
    tiles = [_tile("Step time", picture_seconds(file.seconds), shown)]
    if file.tokens:
        tiles.append(_tile(f"{file.unit.capitalize()} per second", f"{file.tokens_per_second:,.0f}", "all ranks"))
    if file.flops:
        tiles.append(_tile("Model FLOPs utilization", f"{file.model_flops_utilization:.1%}", f"of {of_peak(file)}"))
    tiles.append(_tile("Exposed communication", picture_seconds(exposed), share))
    for tier in tiers_used(forecast):
        peak, budget = peak_bytes(forecast, tier), file.budget.get(tier, 0)
        of = f"{peak / budget:.0%} of {format_bytes(budget)}" if budget else "no budget"
        name = TIER_NAMES[tier]
        tiles.append(_tile(f"{name[0].upper()}{name[1:]} peak", format_bytes(peak), of, peak > budget > 0))
    return tiles


def _measured_tiles(file: PlanFile, beside: Beside | None) -> list[str]:
    if beside is None:
        return []
    measured, again = beside.measured, beside.retimed
    ratio = f"{measured.seconds / file.forecast.seconds:.2f} times the forecast" if file.forecast.seconds else ""
    tiles = [
        _tile("Measured step", picture_seconds(measured.seconds), ratio),
        _tile("Re-timed forecast", picture_seconds(again.seconds), "by the run's own times"),
    ]
    for tier in tiers_used(measured):
        peak, expected = peak_bytes(measured, tier), peak_bytes(file.forecast, tier)
        of = f"{peak / expected:.2f} times the forecast" if expected else ""
        tiles.append(_tile(f"Measured {TIER_NAMES[tier]} peak", format_bytes(peak), of))
    return tiles


def _tile(name: str, value: str, note: str, bad: bool = False) -> str:
    warning = " class=over" if bad else ""
    return f"<div{warning}><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> <span>{escape(note)}</span></dd></div>"
