"""Forecasts: of the very programs that will run and the optimizer's update, and of the coarse programs of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zerograph.core.files.planfile import Holding
from zerograph.core.files.runfile import Measured
from zerograph.core.machine import Machine, is_disk
from zerograph.core.param_bytes import Plain, plain_updates, sizes_of_states
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.step import Step
from zerograph.core.timeline import NOT_COUNTED, Forecast
from zerograph.core.units import counted, format_bytes
from zerograph.planner.profile.regions import Life, Profile
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.micro_batches import gradients_left
from zerograph.planner.programs.placement import between_steps, plain_between_steps
from zerograph.planner.programs.process_memory import Resident, process_growth
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.programs.updates import update_program, with_updates_inside
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate


@dataclass(frozen=True, slots=True)
class ProgramForecast:
    """The programs of a step, their forecast, what its memory is used for, and, on a CPU, what the process grows by."""

    programs: tuple[Program, ...]
    forecast: Forecast
    holdings: tuple[Holding, ...]
    resident: Resident | None = None


def forecast_programs(
    programs: Sequence[Program],
    plan: Plan,
    machine: Machine,
    *,
    moments: int = 2,
    state_sizes: Mapping[str, int] | None = None,
    measured: Measured | None = None,
    adds: bool = False,
    plain: Sequence[Plain] = (),
    not_counted: tuple[str, ...] = NOT_COUNTED,
) -> ProgramForecast:
    """Simulate ``programs`` (forward and backward of one frame, or one inference) on one rank of ``machine``.

    Args:
        moments: float tensors that the optimizer keeps per parameter that trains: 2 for Adam, 0 for plain SGD.
        state_sizes: where the optimizer is known, bytes that it keeps of each parameter that it updates, by name.
        measured: seconds that replace those that follow from the machine's rates.
        adds: there are gradients of earlier micro-batches.
        plain: parameters that are in no bucket, as one rank keeps its own.
        not_counted: what the forecast says that it leaves out.
    """
    rates = Rates.of(machine, plan)
    state_sizes = _state_sizes(plan, moments) if state_sizes is None else state_sizes
    states = (
        *between_steps(plan, state_sizes, rates.staging),
        *(gradients_left(plan) if adds else ()),
        *plain_between_steps(plain, moments, adds=adds),
    )
    step, last = tuple(programs), programs[-1]
    if last.kind == "backward":
        modelled = measured is None or updates_are_modelled(plan)
        inside: tuple[int, ...] = ()
        if modelled and plan.overlap == "backward":
            last, inside = with_updates_inside(last, plan, state_sizes, rates)
        others = plain_updates(plain, moments)
        update = update_program(plan, state_sizes, rates if modelled else None, last, inside, others)
        step = (*step[:-1], last, update)
    forecast, holdings = simulate(step, rates, measured=measured, held=states, not_counted=not_counted)
    peak = forecast.peaks.get("device")
    grows = (
        process_growth(programs, peak.bytes, plan.world_size) if peak is not None and machine.device == "cpu" else None
    )
    return ProgramForecast(step, forecast, holdings, grows)


def not_counted_of(step: Step) -> tuple[str, ...]:
    """What no forecast from rates counts of ``step``: what the model itself sends, and experts that ranks divide."""
    sent = [op for op in step.ops if op.target.startswith(_COLLECTIVES) and not op.target.startswith(_WAITS)]
    sizes, found = {value.name: value.bytes for value in step.values}, []
    if sent:
        received = format_bytes(sum(sizes[name] for op in sent for name in op.writes))
        found.append(f"{counted(len(sent), 'collective')} of the model's own, of {received} together")
    if any(op.target.startswith(_EXPERTS) for op in step.ops):
        found.append("experts that ranks divide: their work and memory, and the tokens that they are sent")
    return tuple(found)


_COLLECTIVES, _WAITS, _EXPERTS = "_c10d_functional.", "_c10d_functional.wait_tensor", "zerograph.routed_experts"
"""What the targets of operations begin with."""


def updates_are_modelled(plan: Plan) -> bool:
    """Whether a recording has seconds of all that an update does, bucket by bucket: of states on a disk. Of states in
    memory it has one number."""
    return any(is_disk(bucket.placement.optimizer) for bucket in plan.buckets)


def forecast_plan(
    scheduler: Scheduler, plan: Plan, not_counted: tuple[str, ...] = (), *, adds: bool = False
) -> tuple[Forecast, tuple[Holding, ...]]:
    """The forecast of ``plan`` from its coarse programs, and what its memory is used for; they agree at every
    moment. With ``adds`` there are gradients of earlier micro-batches."""
    states = between_steps(plan, _state_sizes(plan, scheduler.moments), scheduler.rates.staging)
    held = (*states, *(gradients_left(plan) if adds else ()))
    lives = scheduler.saved(scheduler.options(plan), plan.offload).lives
    # A coarse program has one register for all values with the same life; people want to see each.
    parts = {register: partial(_one_by_one, scheduler.profile, own) for register, own in lives.items()}
    programs = coarse_programs(scheduler, plan, adds=adds)
    return simulate(programs, scheduler.rates, held=held, not_counted=not_counted, parts=parts)


def _one_by_one(profile: Profile, lives: Sequence[Life], together: Holding) -> Iterator[Holding]:
    """``together`` as one life after another; of a part of it as many as it has bytes for."""
    room = together.bytes
    for life in lives:
        region, size = profile.regions[life.start], min(life.bytes, room)
        room -= size
        if size:
            yield replace(together, name=life.name, bytes=size, module=region.module, source=life.source)


def _state_sizes(plan: Plan, moments: int) -> dict[str, int]:
    return sizes_of_states((param for bucket in plan.buckets for param in bucket.params), moments)
