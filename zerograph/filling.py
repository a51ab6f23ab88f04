"""The largest batch or sequence of a model that fits a machine, from its traced step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerograph.config import Config
from zerograph.errors import ConfigError
from zerograph.machine import Machine
from zerograph.planfile import PlanFile
from zerograph.planner.estimate import RESERVE
from zerograph.planner.fill import Filled, fill
from zerograph.planner.infeasible import infeasible
from zerograph.planner.search import Search, Wish
from zerograph.planning import plan_file
from zerograph.steps import Steps
from zerograph.symbolic import Name
from zerograph.units import format_bytes

ATTEMPTS = 4
"""Solutions of which programs may turn out to hold more than the step told: a few percent, where they do."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The plan file at the largest size that fits, and what keeps it from being larger.

    Attributes:
        found: the size, and what the next one would need or why there is none.
        budget: bytes of the device that the search could use: the reserve is taken off, and what the programs turned
            out to hold beyond the step.
    """

    file: PlanFile
    found: Filled
    budget: int


def traced(
    make: Callable[[], Any],
    what: Name,
    *,
    world: int,
    batch: int,
    seq: int,
    dtype: str | None,
    stage: Any = 3,
    moments: int = 2,
) -> Steps:
    """The step of a model by batch or sequence. Stages 1 to 3 and "auto" have the same one; stage 0 has its own."""
    import torch

    compute = getattr(torch, dtype) if dtype is not None else None
    stage = 3 if stage == "auto" else stage
    return Steps(make, what, world=world, batch=batch, seq=seq, dtype=compute, stage=stage, moments=moments)


def largest(
    steps: Steps,
    machine: Machine,
    world: int,
    *,
    memory: int | None = None,
    reserve: float = RESERVE,
    moments: int = 2,
    **options: Any,
) -> tuple[Filled, int]:
    """The largest size at which a plan exists, and the bytes of the device that it may use.

    Args:
        memory: bytes of the device, the reserve not taken off; ``machine``'s unless given.
        reserve: share of it to leave free.
        moments: tensors that the optimizer keeps per parameter, as ``steps`` were traced for.
        options: what :func:`zerograph.backend` is told of stage, buckets, prefetch and recomputation.
    """
    wish = Wish.of(Config.of(**options), world)
    budget = int((machine.capacity("device", world) if memory is None else memory) * (1 - reserve))

    def search(size: int) -> Search:
        return Search(steps.at(size), wish, machine, states=steps.states, moments=moments)

    return fill(search, budget, steps.start), budget


def largest_file(
    name: str,
    make: Callable[[], Any],
    machine: Machine,
    what: Name,
    *,
    world: int = 1,
    batch: int = 1,
    seq: int = 1024,
    dtype: str | None = None,
    moments: int = 2,
    reserve: float = RESERVE,
    fold: bool = True,
    **options: Any,
) -> Largest:
    """Plan the largest step that fits: solve for it on the traced step, then compile its programs.

    If these hold more than the machine has, it is solved again with that much less memory.

    Args:
        what: the dimension to solve for; the other is as given, or as in the inputs that the model brings.
        name, make, machine, world, batch, seq, dtype, moments, reserve, fold, options: as for
            :func:`zerograph.planning.plan_file`.

    Raises:
        ConfigError: with ``offload``: what is solved for is what a backend can run.
        InfeasibleError: not even a size of 1 fits.
        UnsupportedError: the model cannot be traced whole, does not train, or works at one size only.
    """
    if options.get("offload", "none") != "none":
        raise ConfigError("sizes are solved for on the device alone", "plan with --offload at the sizes you think of")
    stage = options.get("stage", 3)
    steps = traced(make, what, world=world, batch=batch, seq=seq, dtype=dtype, stage=stage, moments=moments)
    memory = machine.capacity("device", world)
    for _ in range(ATTEMPTS):
        # With the reserve of a backend.
        found, budget = largest(steps, machine, world, memory=memory, moments=moments, **options)
        if found.value == 0:
            raise infeasible(found.search, steps.at(found.next), machine, budget)
        file = plan_file(
            name, make, machine, world=world, batch=batch, seq=seq, dtype=dtype, moments=moments, reserve=reserve,
            sizes={what: found.value}, memory=memory, fold=fold, **options,
        )  # fmt: skip
        need, have = file.forecast.peaks["device"].bytes, file.budget["device"]
        if need <= have:
            break
        memory = memory * have // need - 1
    return Largest(file, found, budget)


def explained(what: str, found: Filled, budget: int) -> str:
    """The answer in words, with what keeps it from being larger."""
    if found.need is None:
        return f"largest {what}: {found.value}; {found.limit}"
    need, have = format_bytes(found.need), format_bytes(budget)
    return f"largest {what}: {found.value}; {found.next} needs {need} of device memory per rank, of {have}"
