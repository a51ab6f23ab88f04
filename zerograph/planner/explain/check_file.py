"""Rules that every plan file must keep: of its plan, of its programs, and of the forecast and the budget beside them.

The planner calls :func:`check_file` on what it made over all tiers; ``zerograph check`` on what somebody was handed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.files.runfile import Measured
from zerograph.core.machine import Tier
from zerograph.core.timeline import Forecast, Span
from zerograph.core.units import format_bytes
from zerograph.planner.explain.check import BEFORE, PLAN_CHECKS
from zerograph.planner.programs.micro_batches import seconds_of_passes
from zerograph.sim import check as programs
from zerograph.sim.check_step import Wrong
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate

CHECKS: Mapping[str, str] = {
    "budget": "every tier stays within its budget at every moment",
    **{name: sentence for name, (sentence, _) in PLAN_CHECKS.items()},
    **programs.CHECKS,
    "forecast": "what is forecast is what the programs do on the machine",
}
"""Name of a check, and what it makes sure of."""


def check_file(file: PlanFile) -> list[Wrong]:
    """Everything that is wrong with ``file``, check by check; empty when nothing is."""
    found = list(_budget(file))
    for _, finder in PLAN_CHECKS.values():
        found += finder(file.plan)
    wrong = programs.check_programs(file.programs, file.plan)
    found += wrong
    if any(each.check == "reads" for each in wrong):
        return [*found, _at("forecast", None, "programs whose reads are wrong are not simulated")]
    return [*found, *_forecast(file)]


def simulated(file: PlanFile, measured: Measured | None = None) -> tuple[Forecast, tuple[Holding, ...]]:
    """The forecast of the programs of ``file``, and what memory is used for, by the rates of its machine; ``measured``
    seconds replace these."""
    given = {program.contents[register].name for program in file.programs for register in program.given}
    held = tuple(h for h in file.holdings if h.first == h.last == BEFORE and h.name not in given)
    rates, not_counted = Rates.of(file.machine, file.plan), file.forecast.not_counted
    return simulate(file.programs, rates, measured=measured, held=held, not_counted=not_counted)


def _budget(file: PlanFile) -> Iterator[Wrong]:
    for tier, curve in file.forecast.memory.items():
        budget = file.budget.get(tier, 0)
        over = next(((time, level) for time, level in curve if level > budget), None)
        peak = file.forecast.peaks.get(tier)
        before = sum(h.bytes for h in file.holdings if h.tier == tier and h.first == BEFORE)
        # First the plain case: nothing of the step has run, and no task is to blame.
        if before > budget:
            yield _at("budget", None, _too_much(tier, before, budget, "before the step"))
        elif over is not None:
            time, level = over
            yield _at("budget", _cause(file, tier, time), _too_much(tier, level, budget, f"at {time:g} s"))
        elif peak is not None and peak.bytes > budget:
            text = _too_much(tier, peak.bytes, budget, f"in {peak.name}")
            yield Wrong("budget", text, peak.module, peak.source, peak.task)


def _too_much(tier: Tier, held: int, budget: int, when: str) -> str:
    more, limit = format_bytes(held - budget), format_bytes(budget)
    return f"{tier} holds {format_bytes(held)} {when}, {more} more than its budget of {limit}"


def _forecast(file: PlanFile) -> Iterator[Wrong]:
    stated = file.forecast
    true, holdings = simulated(file)
    for span, other in zip_longest(stated.spans, true.spans):
        if span != other:
            yield _at("forecast", span, f"{_task(span)} is forecast, and the programs run {_task(other)}")
            return
    for tier in sorted({*stated.memory, *stated.peaks, *true.memory}):
        stated_peak, peak = stated.peaks.get(tier), true.peaks.get(tier)
        if stated_peak != peak or stated.memory.get(tier) != true.memory.get(tier):
            most = [format_bytes(each.bytes if each is not None else 0) for each in (stated_peak, peak)]
            text = f"{tier} is forecast to hold up to {most[0]}, and the programs hold up to {most[1]}"
            yield _at("forecast", None, text + ", at other moments" * (stated_peak == peak))
    passes = seconds_of_passes(file.programs, file.plan, Rates.of(file.machine, file.plan))
    earlier = (file.micro_batches - 1) * passes
    if file.earlier != earlier:
        text = f"earlier micro-batches are forecast to take {file.earlier:g} s, and take {earlier:g}"
        yield _at("forecast", None, text)
    if stated.critical_path != true.critical_path:
        yield _at("forecast", None, "the critical path is not that of the programs")
    if _held(file.holdings) != _held(holdings):
        yield _at("forecast", None, "what is held is not what the programs hold")


def _task(span: Span | None) -> str:
    return "nothing" if span is None else f"{span.name} from {span.start:g} s to {span.end:g} s"


def _held(holdings: Iterable[Holding]) -> Counter[tuple[object, ...]]:
    """Bytes by role and time: a coarse program holds together what people see one by one."""
    found = Counter[tuple[object, ...]]()
    for each in holdings:
        found[each.kind, each.tier, each.first, each.last] += each.bytes
    return found


def _at(name: str, span: Span | None, message: str) -> Wrong:
    if span is None:
        return Wrong(name, message)
    return Wrong(name, message, span.module, span.source, span.task)


def _cause(file: PlanFile, tier: Tier, time: float) -> Span | None:
    """The task that changes what ``tier`` holds at ``time``: the one that takes the most, or one that ends.

    Where it has no source line, as a gather, that of what it takes stands in.
    """
    starting = {span.task: span for span in file.forecast.spans if span.start == time}
    taken = [h for h in file.holdings if h.tier == tier and h.first in starting]
    if taken:
        most = max(taken, key=lambda h: h.bytes)
        span = starting[most.first]
        return replace(span, module=span.module or most.module, source=span.source or most.source)
    ending = [span for span in file.forecast.spans if span.end == time]
    return next(iter((*starting.values(), *ending)), None)
