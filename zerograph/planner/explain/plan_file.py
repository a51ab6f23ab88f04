"""A plan file from a traced step alone: where plans may offload or tile, as no program of those can be lowered yet."""

from __future__ import annotations

from dataclasses import replace

from zerograph.core.errors import ConfigError, InvariantError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import TIERS, Machine
from zerograph.core.placement import updated_late
from zerograph.core.step import Step
from zerograph.core.timeline import NOT_COUNTED
from zerograph.planner.explain.check import require_plan
from zerograph.planner.explain.check_file import check_file
from zerograph.planner.explain.infeasible import infeasible
from zerograph.planner.explain.reasons import reasons
from zerograph.planner.programs.coarse import coarse_programs, snapshot
from zerograph.planner.programs.forecasts import forecast_plan, not_counted_of
from zerograph.planner.programs.micro_batches import seconds_of_passes
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import search_within
from zerograph.planner.search.search_space import Candidate

UNPROGRAMMED = (
    "what lowering changes: tasks follow the traced step, not a program",
    *NOT_COUNTED,
    "aligning and rounding of extents on NVMe",
)


ALONE = ("that one rank gathers and reduces in place: whole copies and reduced gradients are counted beside shards",)
"""Further effects on one rank that a forecast does not count."""
_REPORT = "this is a bug in the planner: report it with the model and the command"


def file_from_search(
    name: str,
    step: Step,
    constraints: Constraints,
    machine: Machine,
    *,
    moments: int = 2,
    reserve: float = 0.0,
    tokens: int = 0,
    unit: str = "tokens",
    micro_batches: int = 1,
) -> PlanFile:
    """Search the plan of ``step`` that fits every tier of ``machine``, and forecast it from its schedule.

    Args:
        name: of the model, for people.
        moments: tensors that the optimizer keeps per parameter.
        reserve: share of every tier to leave free.
        tokens, unit: of one rank's batch, which may be samples.
        micro_batches: batches before an update; the plan is that of one.

    Raises:
        InfeasibleError: no plan fits.
        InvariantError: the plan fails its own checks, which is a bug of the planner.
        ConfigError: what was asked for does not exist on the machine, or at the stage, or delays no update.
    """
    budget = machine.budget(constraints.ranks, reserve)
    search, found = search_within(step, constraints, machine, budget, moments=moments)
    if found is None:
        raise infeasible(search, step, machine, budget)
    plan, scheduler = found.plan, found.space.scheduler.fresh()
    if plan.overlap == "delayed" and not any(updated_late(plan, bucket) for bucket in plan.buckets):
        raise ConfigError(
            "overlap delayed: programs read the parameters themselves, so that nothing is updated while they compute",
            "--offload optimizer or gradients keeps copies on the device, parameters with --dtype bfloat16 on the host",
        )
    require_plan(step, plan, _REPORT)
    left_out = UNPROGRAMMED + ALONE * (plan.world_size == 1) + not_counted_of(step)
    forecast, holdings = forecast_plan(scheduler, plan, left_out)
    made = PlanFile(
        model=name,
        plan=plan,
        machine=machine,
        budget=budget,
        forecast=forecast,
        holdings=holdings,
        tokens=tokens,
        unit=unit,
        flops=sum(op.flops for op in step.ops),
        programs=snapshot(coarse_programs(scheduler, plan)),
    )
    why = reasons(plan, step, constraints, scheduler.rates, forecast, moments=moments, unexecuted=made.unexecuted)
    file = replace(made, reasons=tuple(why))
    _verify(file, found)
    return file if micro_batches == 1 else _accumulating(file, scheduler, micro_batches)


def _accumulating(file: PlanFile, scheduler: Scheduler, micro_batches: int) -> PlanFile:
    plan = file.plan
    forecast, holdings = forecast_plan(scheduler, plan, file.forecast.not_counted, adds=True)
    programs = snapshot(coarse_programs(scheduler, plan, adds=True))
    return replace(
        file,
        forecast=forecast,
        holdings=holdings,
        programs=programs,
        micro_batches=micro_batches,
        earlier=(micro_batches - 1) * seconds_of_passes(programs, plan, scheduler.rates),
    )


def _verify(file: PlanFile, found: Candidate) -> None:
    """Check that the file handed out is the plan that was found, and passes ``zerograph check``."""
    peaks = tuple(file.forecast.peaks[tier].bytes if tier in file.forecast.peaks else 0 for tier in TIERS)
    # Two roads to one number: the search measures, the forecast simulates with everything named.
    if peaks != found.peaks:
        raise InvariantError(f"the planner found peaks of {found.peaks} bytes and forecasts {peaks}", _REPORT)
    for wrong in check_file(file):
        raise InvariantError(f"the planner made a plan that fails its own check of {wrong.check}: {wrong}", _REPORT)
