"""A plan's forecast again, with the seconds of a run of it in place of a machine's rates; nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Run, move_key
from zerograph.core.timeline import Forecast, Span
from zerograph.planner.explain.check_file import simulated

_RECORD = 'record a run of this plan: zerograph.backend(plan="plan.json") trains by it, backend.record() records'


def retimed(file: PlanFile, run: Run) -> Forecast:
    """The forecast of ``file`` with the seconds that ``run`` measured.

    Raises:
        ConfigError: the run is not one of this plan, or of another batch or device; says what differs.
    """
    _refuse(file, run)
    measured, own = run.measured, dict[str, float]()
    by_bucket = {"gather": measured.gathers, "reduce": measured.reduces}
    for span in file.forecast.spans:
        if span.operation in by_bucket and span.bucket not in by_bucket[span.operation]:
            raise ConfigError(f"the run has no {span.name}", _RECORD)
    # Of other processes the same segment has another digest.
    for planned, ran in zip(_segments(file.forecast), _segments(run.forecast), strict=True):
        if ran.key not in measured.segments:
            raise ConfigError(f"the run has no seconds of the segment {ran.key}", _RECORD)
        own[planned.key] = measured.segments[ran.key]
    return simulated(file, replace(measured, segments=own))[0]


def tasks_of(file: PlanFile, run: Run) -> dict[int, list[Span]]:
    """By task of ``file``, the spans of ``run`` that are that task: of a collective its start and its wait, of a
    move all its transfers, and every optimizer's update.

    Raises:
        ConfigError: as :func:`retimed`.
    """
    _refuse(file, run)
    measured: dict[tuple[object, ...], list[list[Span]]] = {}
    for span in run.forecast.spans:
        before = measured.setdefault(_identity(span), [])
        # Every optimizer's update, and all transfers of one move; a collective's start and its wait.
        all_of_them = span.operation == "update" or span.what
        if before and (all_of_them or (span.stream != "compute" and len(before[-1]) == 1)):
            before[-1].append(span)
        else:
            before.append([span])
    found: dict[int, list[Span]] = {}
    for span in file.forecast.spans:
        same = measured.get(_identity(span), [])
        if same:
            found[span.task] = same.pop(0)
    return found


def _identity(span: Span) -> tuple[object, ...]:
    """The fields by which a task of the plan is found in a run; tasks with equal fields are matched in order."""
    if span.operation == "compute":
        return span.phase, span.module
    if span.what:
        return span.phase, move_key(span.operation, span.what, span.bucket, span.label)
    return span.operation, span.bucket, span.tile


def _refuse(file: PlanFile, run: Run) -> None:
    if run.plan != file.plan.digest:
        raise ConfigError(f"the run is one of plan {run.plan}, and this is plan {file.plan.digest}", _RECORD)
    if run.device != file.machine.device:
        raise ConfigError(
            f"the run was on {run.device}, and the plan is for {file.machine.name} ({file.machine.device}), where "
            "other things run side by side",
            "make the plan with --machine cpu, or for the machine that `zerograph bench` measured",
        )
    planned, ran = list(_segments(file.forecast)), list(_segments(run.forecast))
    if not all(span.key for span in planned):
        raise ConfigError("the plan was forecast from its schedule, not from segments that run", _RECORD)
    if list(map(_identity, planned)) != list(map(_identity, ran)):
        pairs = enumerate(zip(planned, ran, strict=False))
        at = next((i for i, (a, b) in pairs if _identity(a) != _identity(b)), -1)
        first = f"; the first that differs is {planned[at].name}, not {ran[at].name}" if at >= 0 else ""
        raise ConfigError(f"the run has {len(ran)} segments and the plan {len(planned)}{first}", _RECORD)
    for a, b in zip(planned, ran, strict=True):
        if a.flops != b.flops:
            raise ConfigError(
                f"{a.name} has {a.flops} operations in the plan and {b.flops} in the run: it was of another batch or "
                "sequence",
                "make the plan at the size that runs: zerograph plan MODEL --batch B --seq S",
            )


def _segments(forecast: Forecast) -> Iterator[Span]:
    return (span for span in forecast.spans if span.operation == "compute")
