"""Forecasts: of the very programs that will run and the optimizer's update, and of the sketch of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zerograph.core.machine import Machine
from zerograph.core.param_bytes import kept_states
from zerograph.core.plan import Bucket, Plan
from zerograph.core.files.planfile import Holding
from zerograph.core.program import Instruction, Program, Spill, Write
from zerograph.core.files.runfile import Measured
from zerograph.sim.simulate import simulate
from zerograph.core.step import Kind
from zerograph.core.timeline import NOT_COUNTED, Forecast
from zerograph.planner.build.placement import APART, BucketPart, between_steps, bucket_parts
from zerograph.planner.build.process_memory import Resident, resident
from zerograph.planner.build.rates import Rates, device_update
from zerograph.planner.profile.regions import Life, Profile
from zerograph.planner.build.schedule import Registers, Scheduler
from zerograph.planner.build.sketch import sketch, update_away


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
    kept: Mapping[str, int] | None = None,
    measured: Measured | None = None,
) -> ProgramForecast:
    """Simulate ``programs`` (forward and backward of one frame, or one inference) on one rank of ``machine``.

    Args:
        moments: float tensors that the optimizer keeps per parameter that trains: 2 for Adam, 0 for plain SGD.
        kept: where the optimizer is known, bytes that it keeps of each parameter that it updates, by name.
        measured: seconds that replace those that follow from the machine's rates.
    """
    rates = Rates(machine, plan.world_size, plan.compute_dtype)
    kept = _kept(plan, moments) if kept is None else kept
    states = tuple(between_steps(plan, kept, rates.staging))
    step, last = tuple(programs), programs[-1]
    if last.kind == "backward":
        # A recording has no seconds of what an update reads and writes.
        step += (update_program(plan, kept, rates if measured is None else None, last),)
    forecast, holdings = simulate(step, rates, measured=measured, held=states, not_counted=NOT_COUNTED)
    peak = forecast.peaks.get("device")
    grows = resident(programs, peak.bytes, plan.world_size) if peak is not None and machine.device == "cpu" else None
    return ProgramForecast(step, forecast, holdings, grows)


def forecast_sketch(
    scheduler: Scheduler, plan: Plan, not_counted: tuple[str, ...] = ()
) -> tuple[Forecast, tuple[Holding, ...]]:
    """The forecast of ``plan`` from its sketch, and what its memory is used for; they agree at every moment."""
    states = tuple(between_steps(plan, _kept(plan, scheduler.moments), scheduler.rates.staging))
    lives = scheduler.saved(scheduler.levels(plan), plan.offload).lives
    # A sketch has one register for all values with the same life; people want to see each.
    parts = {register: partial(_one_by_one, scheduler.profile, own) for register, own in lives.items()}
    return simulate(sketch(scheduler, plan), scheduler.rates, held=states, not_counted=not_counted, parts=parts)


KINDS: Mapping[Kind, str] = {
    "param": "parameters",
    "state": "optimizer states",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "temporary": "temporaries",
}
"""The uses of memory, as people call them."""


def _one_by_one(profile: Profile, lives: Sequence[Life], together: Holding) -> Iterator[Holding]:
    """``together`` as one life after another; of a part of it as many as it has bytes for."""
    room = together.bytes
    for life in lives:
        region, size = profile.regions[life.start], min(life.bytes, room)
        room -= size
        if size:
            yield replace(together, name=life.name, bytes=size, module=region.module, source=life.source)


def _kept(plan: Plan, moments: int) -> dict[str, int]:
    return kept_states((param for bucket in plan.buckets for param in bucket.params), plan.world_size, moments)


def update_program(
    plan: Plan, kept: Mapping[str, int], streams: Rates | None = None, backward: Program | None = None
) -> Program:
    """The optimizer's update of the parameters in ``kept`` (:func:`~zerograph.core.param_bytes.kept_states`).

    With ``streams``, the rates of a machine, states off the device are updated there, bucket by bucket, when what moves
    their gradients off the device in ``backward`` has ended.
    Without, all of it is one instruction, as a recording sees it.
    """
    names, instructions = tuple(bucket.name for bucket in plan.buckets), list[Instruction]()
    registers, arrived = Registers(backward.contents if backward is not None else ()), dict[int, tuple[int, ...]]()
    for each in backward.instructions if backward is not None else ():
        if isinstance(each, Spill | Write) and each.what == "gradient":
            arrived[each.bucket] = each.writes
    away = list[int]()
    if streams is not None:
        known = _Known(names, streams, registers, plan.buckets, kept)
        there = (b.index for b in plan.buckets if b.homes.optimizer != "device")
        away = [index for index in there if known.bucket_parts(index, 1)[0].shards.at(APART).optimizer]
        for number, bucket in enumerate(away):
            homes = plan.buckets[bucket].homes
            instructions += update_away(known, bucket, 0, 1, plan.update, homes, number, arrived.get(bucket, ()), -1)
    whole = device_update([bucket.params for bucket in plan.buckets], away, plan.world_size, kept)
    if whole.sizes or not away:
        last = streams is not None and streams.staging != "device"
        instructions.insert(len(instructions) if last else 0, whole)  # as sketches have it
    contents, segments = tuple(registers.contents), backward.segments if backward is not None else ()
    return Program(
        "update", 0, len(contents), tuple(instructions), (), segments, contents, names, carries=backward is not None
    )


@dataclass(slots=True)
class _Known:
    """Buckets whose optimizer is known: bytes that it keeps are told, not assumed."""

    names: Sequence[str]
    rates: Rates
    registers: Registers
    buckets: Sequence[Bucket]
    kept: Mapping[str, int]

    def bucket_parts(self, bucket: int, tiles: int) -> tuple[BucketPart, ...]:
        """The bucket, as a whole."""
        rates, params = self.rates, self.buckets[bucket].params
        (part,) = bucket_parts(self.names[bucket], params, tiles, {}, rates, 0)
        states = sum(self.kept.get(p.name, 0) for p in params if p.sharded)
        return (replace(part, shards=replace(part.shards, moments=states)),)
