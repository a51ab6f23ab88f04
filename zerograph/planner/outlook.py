"""Forecasts: of the very programs that will run and the optimizer's update, and of the sketch of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zerograph.core.machine import Machine, Tier
from zerograph.core.plan import Plan
from zerograph.core.planfile import Holding
from zerograph.core.program import Program, Update
from zerograph.core.runfile import Measured
from zerograph.core.simulate import simulate
from zerograph.core.step import Kind
from zerograph.core.timeline import NOT_COUNTED, Forecast
from zerograph.planner.process_memory import Resident, resident
from zerograph.planner.rates import Rates, shard_bytes, state_bytes, update_bytes
from zerograph.planner.regions import Life, Profile
from zerograph.planner.schedule import Decisions, Scheduler
from zerograph.planner.sketch import sketch


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast, what its memory is used for, and, on a CPU, what the process grows by."""

    forecast: Forecast
    holdings: tuple[Holding, ...]
    resident: Resident | None = None


def outlook(
    programs: Sequence[Program],
    plan: Plan,
    machine: Machine,
    *,
    moments: int = 2,
    measured: Measured | None = None,
) -> Outlook:
    """Simulate ``programs`` (forward and backward of one frame, or one inference) on one rank of ``machine``.

    Args:
        moments: float tensors that the optimizer keeps per parameter: 2 for Adam, 0 for plain SGD.
        measured: seconds that replace those that follow from the machine's rates.
    """
    rates = Rates(machine, plan.world_size, plan.compute_dtype)
    states = tuple(_states(plan, moments))
    trains = any(program.kind == "backward" for program in programs)
    step = [*programs, update(plan, moments)] if trains else programs
    forecast, holdings = simulate(step, rates, measured=measured, held=states, not_counted=NOT_COUNTED)
    peak = forecast.peaks.get("device")
    grows = resident(programs, peak.bytes, plan.world_size) if peak is not None and machine.device == "cpu" else None
    return Outlook(forecast, holdings, grows)


def scheduled(
    scheduler: Scheduler, plan: Plan, not_counted: tuple[str, ...] = ()
) -> tuple[Forecast, tuple[Holding, ...]]:
    """The forecast of ``plan`` from its sketch, and what its memory is used for; they agree at every moment."""
    decisions = Decisions.of(plan, scheduler.profile)
    states = tuple(_shards(scheduler, plan))
    lives = scheduler.saved(decisions.levels, decisions.offload).lives
    parts = {register: partial(_one_by_one, scheduler.profile, own) for register, own in lives.items()}
    programs = sketch(scheduler, decisions)
    return simulate(programs, scheduler.rates, held=states, not_counted=not_counted, parts=parts)


def _one_by_one(profile: Profile, lives: Sequence[Life], together: Holding) -> Iterator[Holding]:
    """What is held together, as one life after another."""
    for life in lives:
        region = profile.regions[life.start]
        yield replace(together, name=life.name, bytes=life.bytes, module=region.module, source=life.source)


def update(plan: Plan, moments: int) -> Program:
    """The optimizer's update of a plan whose shards and states live on the device.

    It is one pass over parameters, gradients and states; the gradients go afterwards (``zero_grad``).
    """
    params = [p for bucket in plan.buckets for p in bucket.params if p.trainable]
    sizes = tuple(update_bytes(p, plan.world_size, moments) for p in params)
    trained = tuple(b.index for b in plan.buckets if any(p.trainable for p in b.params))
    names = tuple(bucket.name for bucket in plan.buckets)
    return Program("update", 0, 0, (Update(trained, sizes),), (), (), buckets=names)


def _states(plan: Plan, moments: int) -> Iterator[Holding]:
    """What lies on the device between steps: shards, and the optimizer's moments. Gradients come with the backward."""
    params = [p for bucket in plan.buckets for p in bucket.params]
    shards, states = state_bytes(params, plan.world_size, moments)
    yield Holding("shards of parameters", "param", "device", shards, -1, -1)
    if states:
        yield Holding("optimizer states", "state", "device", states, -1, -1)


def _shards(scheduler: Scheduler, plan: Plan) -> Iterator[Holding]:
    """What lies on each tier between steps, bucket by bucket."""
    for bucket in plan.buckets:
        shards, homes = scheduler.transfers(bucket.index, 1)[0].shards, bucket.homes
        whole = sum(shard_bytes(p, plan.world_size) for p in bucket.params)
        trained = sum(shard_bytes(p, plan.world_size) for p in bucket.params if p.trainable)
        found: list[tuple[str, Kind, Tier, int]]
        if homes.optimizer == "device":
            found = [("shards", "param", "device", whole), ("states", "state", "device", trained * scheduler.moments)]
        else:
            frozen = shards.frozen if homes.parameters != "device" else 0
            stays = whole - shards.gradient - frozen
            found = [
                ("shards", "param", "device", stays),
                ("states", "state", "device", (trained - shards.gradient) * scheduler.moments),
                ("shards in the compute dtype", "param", homes.parameters, shards.copy + frozen),
                ("master copy and states", "state", homes.optimizer, shards.optimizer),
            ]
        for what, kind, tier, size in found:
            if size:
                yield Holding(f"{what} of {bucket.name}", kind, tier, size, -1, -1, bucket.name)
