"""The totals of a plan: speed, memory per tier and work per stream, as data and as rows for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from zerograph.cli.terminal import Cell, drawable, show_table, width
from zerograph.cli.view.collapsing import short_source
from zerograph.cli.view.drawing import ASCII_BAR, ASCII_BLOCKS, BAR, BLOCKS, bar, sparkline
from zerograph.cli.view.groups import peak_moments
from zerograph.cli.view.moment import START, Moment, by_kind
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.timeline import STREAMS, Forecast, Peak
from zerograph.core.units import counted, format_bytes, format_ranks, format_seconds

BAR_WIDTH = 20
NARROWEST, WIDEST = 16, 60
BESIDE_SPARKLINE = 44
"""Columns that the name of a tier and its peak need."""


def show_summary(file: PlanFile, beside: Beside | None = None) -> None:
    """Write the summary of ``file`` as three tables, beside what a run measured, and the forecast with its seconds."""
    unicode = drawable(BLOCKS + BAR)
    drawing = min(max(width() - BESIDE_SPARKLINE, NARROWEST), WIDEST)
    run = beside.measured if beside is not None else None
    show_table(headline(file, beside))
    click.echo()
    show_table(memory(file, run, drawing, unicode=unicode))
    click.echo()
    show_table(streams(file, run, unicode=unicode), numbers={2, 3})


def as_data(file: PlanFile, beside: Beside | None) -> dict[str, Any]:
    """The part of ``--json`` that says what the plan comes to; docs/guide/json.md has the schema."""
    forecast, plan = file.forecast, file.plan
    data: dict[str, Any] = {
        "model": file.model,
        "digest": file.digest,
        "plan_digest": plan.digest,
        "machine": file.machine.name,
        "stage": plan.stage,
        "world_size": plan.world_size,
        "replicas": plan.replicas,
        "hosts": plan.hosts,
        "prefetch": plan.prefetch,
        "buckets": len(plan.buckets),
        **_outcome(forecast),
        "micro_batches": file.micro_batches,
        "earlier": file.earlier,
        "tokens_per_second": file.tokens_per_second,
        "unit": file.unit,
        "model_flops_utilization": file.model_flops_utilization,
        "peak_flops": file.peak_flops,
        "budget": dict(file.budget),
        "outside": file.machine.outside(plan.world_size, plan.replicas),
        "critical_path": list(forecast.critical_path),
        "reasons": [asdict(reason) for reason in file.reasons],
        "not_counted": list(forecast.not_counted),
    }
    if beside is None:
        return data
    return {**data, "measured": _outcome(beside.measured), "retimed": _outcome(beside.retimed)}


def _outcome(forecast: Forecast) -> dict[str, Any]:
    peaks = forecast.peaks
    return {
        "seconds": forecast.seconds,
        "exposed_communication": forecast.exposed_communication,
        "peaks": {tier: asdict(peaks[tier]) for tier in TIERS if tier in peaks},
        "streams": dict(forecast.busy()),
    }


def headline(file: PlanFile, beside: Beside | None) -> list[Sequence[Cell]]:
    """Rows: what was planned, and how fast it is."""
    plan, forecast, measured = file.plan, file.forecast, beside.measured if beside else None
    ranks = format_ranks(plan.world_size, plan.replicas)
    decided = f"stage {plan.stage}, {ranks}, {counted(len(plan.buckets), 'bucket')}"
    rows: list[Sequence[Cell]] = [
        ["model", (file.model, "bold")],
        ["plan", f"{decided}, prefetch {plan.prefetch}"],
        ["machine", file.machine.title],
        *([["hosts", hosts]] if (hosts := file.machine.describe_hosts(plan.world_size, plan.replicas)) else ()),
        ["step", ", ".join(_speed(file, measured))],
    ]
    if file.micro_batches > 1:
        rows.append(["of it", f"{micro_batches(file)}, with the update, which is what follows"])
    if beside is not None:
        rows.append(
            ["re-timed", f"{_retimed(beside.measured, beside.retimed)}, with the run's segments, transfers and update"]
        )
    exposed = forecast.exposed_communication
    if plan.ranks > 1:
        text = f"{format_seconds(exposed)} of communication ({_percent(exposed, forecast.seconds)} of the step)"
        rows.append(["exposed", text + _against(exposed, measured.exposed_communication if measured else None)])
    if forecast.critical_path:
        rows.append(["bound by", _bound(forecast)])
    rows += [["why", f"{reason.decision}: {reason.why}"] for reason in file.reasons if reason.subject == "plan"]
    if forecast.not_counted:
        rows.append(["not counted", ", ".join(forecast.not_counted)])
    return rows


def micro_batches(file: PlanFile) -> str:
    """The parts of a step that accumulates."""
    before = file.micro_batches - 1
    each, last = format_seconds(file.earlier / before), format_seconds(file.forecast.seconds)
    return f"{before} of {file.micro_batches} micro-batches take {each} each, and the last {last}"


def _retimed(measured: Forecast, retimed: Forecast) -> str:
    """The forecast with the seconds of a run; its streams overlap as planned, so its peaks may be others."""
    peaks = ", ".join(f"{format_bytes(peak.bytes)} of {tier}" for tier, peak in retimed.peaks.items())
    return f"{format_seconds(retimed.seconds)}{_against(retimed.seconds, measured.seconds)}, {peaks}"


def _bound(forecast: Forecast) -> str:
    """The streams of the critical path with their seconds, the most first."""
    path = [forecast.spans[task] for task in forecast.critical_path]
    seconds = {stream: sum(s.end - s.start for s in path if s.stream == stream) for stream in STREAMS}
    parts = sorted((item for item in seconds.items() if item[1]), key=lambda item: -item[1])
    return ", ".join(f"{format_seconds(time)} of {stream}" for stream, time in parts)


def _speed(file: PlanFile, measured: Forecast | None) -> Iterator[str]:
    # A run has recorded one micro-batch, with its update.
    yield format_seconds(file.seconds) + _against(file.forecast.seconds, measured.seconds if measured else None)
    if file.tokens:
        yield f"{_three_digits(file.tokens_per_second)} {file.unit}/s"
    if file.flops:
        yield f"MFU {100 * file.model_flops_utilization:.1f}% of {of_peak(file)}"


def of_peak(file: PlanFile) -> str:
    """The peak rate that utilization is relative to."""
    rate, source = file.machine.peak_rate(file.plan.compute_dtype)
    return f"{rate / 1e12:.3g} TFLOP/s {source}"


def memory(file: PlanFile, measured: Forecast | None, width: int, *, unicode: bool) -> list[Sequence[Cell]]:
    """Rows: a sparkline per tier that holds anything, its peak against its budget, and where the peak is."""
    forecast, blocks = file.forecast, BLOCKS if unicode else ASCII_BLOCKS
    rows: list[Sequence[Cell]] = []
    moments = peak_moments(file)
    for tier in (t for t in TIERS if t in forecast.peaks):
        peak, budget = forecast.peaks[tier], file.budget.get(tier, 0)
        line = sparkline(forecast.memory.get(tier, ()), forecast.seconds, width, blocks)
        over = peak.bytes > budget
        rows.append([tier, (line, "red" if over else "cyan"), (_used(peak.bytes, budget), "bold red" if over else "")])
        rows += [["", text, ""] for text in (_where(file, tier, peak), *_largest(moments[tier], tier))]
        if tier == "device" and (beside := outside(file.machine, file.plan.world_size, file.plan.replicas)):
            rows.append(["", beside, ""])
        if measured is not None and tier in measured.peaks:
            line = sparkline(measured.memory.get(tier, ()), measured.seconds, width, blocks)
            actual = measured.peaks[tier].bytes
            shown = f"{format_bytes(actual)} measured{_ratio(peak.bytes, actual)}"
            rows.append(["", (line, "magenta"), shown])
    return rows


def outside(machine: Machine, world_size: int, replicas: int = 1) -> str:
    """The parts of a rank's device that no budget has; empty where there are none."""
    parts = [f"{what} {format_bytes(size)}" for what, size in machine.outside(world_size, replicas).items()]
    return f"outside of torch's allocator: {', '.join(parts)}" if parts else ""


def streams(file: PlanFile, measured: Forecast | None, *, unicode: bool) -> list[Sequence[Cell]]:
    """Rows: each stream that works, the share of the step in which it does, and its seconds."""
    seconds, busy = file.forecast.seconds, file.forecast.busy()
    actual = measured.busy() if measured is not None else {}
    rows: list[Sequence[Cell]] = []
    for stream in (s for s in STREAMS if busy.get(s) or actual.get(s)):
        work = busy.get(stream, 0.0)
        share = work / seconds if seconds else 0.0
        drawn = bar(share, BAR_WIDTH, BAR if unicode else ASCII_BAR)
        row: list[Cell] = [stream, (drawn, "green" if stream == "compute" else "blue")]
        row += [_percent(work, seconds), format_seconds(work)]
        if measured is not None:
            row.append(f"{format_seconds(actual.get(stream, 0.0))} measured{_ratio(work, actual.get(stream, 0.0))}")
        rows.append(row)
    return rows


def _used(size: int, budget: int) -> str:
    if not budget:
        return f"{format_bytes(size)}, no budget"
    return f"{format_bytes(size)} of {format_bytes(budget)} ({_percent(size, budget)})"


def _where(file: PlanFile, tier: Tier, peak: Peak) -> str:
    """The task that reaches the peak, and the one that computes then: the first may be a gather of a few KiB."""
    during = file.forecast.computing(peak)
    sources = (during.source, *(h.source for h in file.holdings if h.first == peak.task != START and h.tier == tier))
    place = _in_parentheses(short_source(next(filter(None, sources), "")))
    return f"peak at {peak.name}{f' during {during.name}' if during.task != peak.task else ''}{place}"


def _largest(at: Moment, tier: Tier) -> Iterator[str]:
    """The largest tensors held at the peak, one by one, and how many bytes the others of each kind have."""
    held = [h for h in at.holdings if h.tier == tier]
    for holding in held[:_LARGEST]:
        place = _in_parentheses(holding.module, short_source(holding.source))
        yield f"  {format_bytes(holding.bytes)} {holding.kind} {holding.name}{place}"
    others = by_kind(held[_LARGEST:])[:_LARGEST]
    if others:
        yield "  others: " + ", ".join(f"{format_bytes(size)} {kind}" for kind, size in others)


_LARGEST = 3


def _in_parentheses(*parts: str) -> str:
    text = " ".join(filter(None, parts))
    return f" ({text})" if text else ""


def _against(forecast: float, measured: float | None) -> str:
    if measured is None:
        return ""
    return f" ({format_seconds(measured)} measured{_ratio(forecast, measured)})"


def _ratio(forecast: float, measured: float) -> str:
    return f", x{measured / forecast:.2f}" if forecast else ""


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.1f}%" if total else "-"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"
