"""From a model to a plan file: trace it for simulated ranks, and forecast the programs that would run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from zerograph.core.config import FOLDERS, Config
from zerograph.core.errors import ConfigError, InfeasibleError
from zerograph.core.executable import tiers_run
from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.plan import Offload, Overlap, Update
from zerograph.core.timeline import NOT_COUNTED
from zerograph.dryrun.compile_only import Compiled, compile_only, tracing
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.explain.plan_file import file_from_search
from zerograph.planner.explain.reasons import reasons
from zerograph.planner.programs.forecasts import forecast_programs, not_counted_of
from zerograph.planner.programs.micro_batches import seconds_of_passes
from zerograph.planner.search.constraints import Constraints, open_placements, open_tiers
from zerograph.sim.rates import Rates

ATTEMPTS = 8
"""Plans that are compiled in search of one whose programs hold no more than they may, after the first."""


def plan_file(
    name: str,
    make: Callable[[], Any],
    machine: Machine,
    *,
    world: int = 1,
    replicas: int = 1,
    batch: int = 1,
    seq: int = 1024,
    dtype: str | None = None,
    moments: int = 2,
    reserve: float = 0.0,
    memory: int | None = None,
    offload: Offload | Literal["auto"] = "none",
    tier: Tier | None = None,
    overlap: Overlap | Literal["auto"] = "none",
    update: Update | Literal["auto"] = "host",
    micro_batches: int = 1,
    repeat_layers: bool = True,
    device: str = "cpu",
    **options: Any,
) -> PlanFile:
    """Plan one training step of what ``make`` returns.

    Args:
        name: of the model, for people.
        make: see :func:`zerograph.dryrun.compile_only.compile_only`.
        world, replicas: ranks that split a parameter, and ranks that hold the same part of it.
        batch, seq: of each rank.
        dtype: compute dtype by name; each parameter's own unless given.
        moments: tensors that the optimizer keeps per parameter.
        reserve: share of every tier to leave free.
        memory: bytes of the device that a search may fill: then the plan is searched at any stage, for what the
            options leave open.
        offload, tier, overlap, update: as in :class:`~zerograph.planner.search.constraints.Constraints`. Unless
            ``offload`` is "none", the plan is searched over all tiers of ``machine``, and forecast from its schedule:
            no program is lowered for it.
        micro_batches: batches whose gradients are accumulated before an update; the plan is that of one.
        repeat_layers, device: see :func:`zerograph.dryrun.compile_only.compile_only`.
        options: further arguments of :func:`zerograph.backend`. At stage "auto" the plan fills ``machine``'s memory.
            Plans with ``activations`` on a tier that no program reaches on ``machine`` are forecast like others that
            are offloaded.

    Raises:
        ConfigError: a tier without offload, ``memory`` with it, an offload that the stage or the machine does not
            allow, an overlap without it or on a CPU, or with several micro-batches.
        InfeasibleError: no plan that is searched for fits.
        UnsupportedError: the model cannot be traced whole, or does not train.
    """
    compute = torch_compute_dtype(dtype, world, offload)
    refuse_offload(offload, tier, machine, world * replicas, options.get("stage", 3), overlap, update)
    if micro_batches > 1 and overlap != "none":
        raise ConfigError(
            f"overlap {overlap} is given, and {micro_batches} micro-batches: updates would stand beside the first of "
            "them, and the last one is forecast",
            "leave one of the two out; the whole batch in parts, --batch-tiles, has any overlap",
        )
    if offload != "none" and memory is not None:
        raise ConfigError("memory cannot be given with offload", "give a machine with that memory")
    saved = options.get("activations", "auto")
    if saved in FOLDERS:
        options |= {FOLDERS[saved]: "."}  # to which nothing is written
    if offload != "none" or saved not in ("auto", "keep", *tiers_run(machine)):
        if saved in TIERS:
            open_tiers(machine, world * replicas, "optimizer", saved)  # which refuses what is not there
        config = Config.of(**options)
        asked: dict[str, Any] = {"offload": offload, "tier": tier, "overlap": overlap, "update": update}
        constraints = Constraints.of(config, world, replicas=replicas, hosts=machine.hosts(world), **asked)
        compiled = compile_only(
            make, world_size=world, batch=batch, seq=seq, repeat_layers=repeat_layers, programs=False, searched=True,
            moments=moments, dtype=compute, device=device, **tracing(config),
        )  # fmt: skip
        step = compiled.frame.step.movable(world)
        return file_from_search(
            name, step, constraints, machine, moments=moments, reserve=reserve, tokens=compiled.tokens,
            unit=compiled.unit, micro_batches=micro_batches,
        )  # fmt: skip
    if options.get("stage") == "auto" or memory is not None:
        options |= {"memory": machine.capacity("device", world) if memory is None else memory, "machine": machine}

    def planned_file(**more: Any) -> tuple[PlanFile, int]:
        found = compile_only(
            make, world_size=world, replicas=replicas, batch=batch, seq=seq, repeat_layers=repeat_layers,
            dtype=compute, moments=moments, device=device, per_host=machine.per_host(world), **options | more,
        )  # fmt: skip
        file = forecast_file(name, found, machine, moments=moments, reserve=reserve, micro_batches=micro_batches)
        return file, found.searched

    return within(planned_file) if "memory" in options else planned_file()[0]


def within(planned_file: Callable[..., tuple[PlanFile, int]]) -> PlanFile:
    """The fastest plan whose programs hold no more than they may.

    The search counts the step before it is compiled, and what crosses a cut inside of a layer has no kernel to fuse
    into: programs may hold a percent or two more. Then the next plan is asked for that is predicted to need less, one
    by one, so that more memory never gives a slower plan.

    Args:
        planned_file: a plan with its programs' forecast, and the bytes that the search counted; within ``memory``
            bytes, where they are given.
    """
    file, searched = planned_file()
    for _ in range(ATTEMPTS):
        if file.forecast.peaks["device"].bytes <= file.budget["device"]:
            break
        try:
            # One byte less than the search counted for this plan, so that it must give another one.
            file, searched = planned_file(memory=int((searched - 1) / (1 - RESERVE)))
        except InfeasibleError:
            break  # by the search nothing holds less; what was found is shown with what it overruns
    return file


def torch_compute_dtype(dtype: str | None, world: int, offload: Offload | Literal["auto"]) -> Any:
    """The torch dtype of that name.

    One rank alone keeps its parameters as they are unless they compute in a dtype, and could move none of them.
    """
    import torch

    if dtype is None:
        return torch.float32 if world == 1 and offload != "none" else None
    return getattr(torch, dtype)


def refuse_offload(
    offload: Offload | Literal["auto"],
    tier: Tier | None,
    machine: Machine,
    world: int,
    stage: Any,
    overlap: Overlap | Literal["auto"] = "none",
    update: Update | Literal["auto"] = "host",
) -> None:
    """Refuse an impossible offload before minutes of tracing.

    Raises:
        ConfigError: a tier, an overlap or an update on the device without offload, or an offload that the stage or the
            machine does not allow.
    """
    if offload == "none":
        if tier is not None:
            raise ConfigError(f"tier {tier} is given, and offload is none", "say what goes there: --offload optimizer")
        if overlap != "none":
            raise ConfigError(
                f"overlap {overlap} is given, and offload is none: updates on the device stand behind the backward",
                "say what leaves it: --offload optimizer",
            )
        if update != "host":
            raise ConfigError(
                f"update {update} is given, and offload is none: states are on the device, which updates them",
                "say what leaves it: --offload optimizer --tier host",
            )
        return
    if overlap != "none" and machine.device == "cpu":
        raise ConfigError(
            f"on {machine.name} the cores that update are those that compute: no forecast tells how they share",
            'plan without it, and measure overlap="forward"',
        )
    if overlap == "delayed" and offload != "optimizer" and tier != "host":
        raise ConfigError(
            f"overlap delayed is given with --offload {offload}: on NVMe gradients lie where the next backward writes",
            "leave them on the device, --offload optimizer, or say --tier host",
        )
    open_placements(offload, open_tiers(machine, world, offload, tier), 3 if stage == "auto" else stage)


def forecast_file(
    name: str,
    compiled: Compiled,
    machine: Machine,
    *,
    moments: int = 2,
    reserve: float = 0.0,
    micro_batches: int = 1,
) -> PlanFile:
    """The plan file of a model that was compiled already: what :func:`plan_file` does after tracing."""
    frame = compiled.frame
    # The optimizer decides where its updates run, and the forecast of programs has them behind the backward.
    plan = replace(frame.plan, overlap="none")
    passes = [frame.programs["forward"], frame.programs["backward"]]
    left_out, adds = NOT_COUNTED + not_counted_of(frame.step), micro_batches > 1
    found = forecast_programs(
        passes, plan, machine, moments=moments, adds=adds, plain=compiled.plain, not_counted=left_out
    )
    flops = sum(op.flops for op in frame.step.ops)  # the model's own: what is recomputed counts once
    rates = Rates.of(machine, plan)
    config = compiled.config
    constraints = Constraints.of(config, plan.world_size, replicas=plan.replicas, hosts=plan.hosts)
    why = reasons(plan, frame.step, constraints, rates, found.forecast, moments=moments, searched=config.searches)
    return PlanFile(
        model=name,
        plan=plan,
        machine=machine,
        budget=machine.budget(plan.ranks, reserve),
        forecast=found.forecast,
        holdings=found.holdings,
        reasons=tuple(why),
        passes=tuple(frame.passes),
        tokens=compiled.tokens,
        unit=compiled.unit,
        flops=flops,
        programs=found.programs,
        micro_batches=micro_batches,
        earlier=(micro_batches - 1) * seconds_of_passes(passes, plan, rates),
    )
