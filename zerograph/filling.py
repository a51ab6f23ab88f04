"""The largest batch or sequence of a model that fits a machine, from its traced step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from zerograph.core.config import Config
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.plan import Offload
from zerograph.core.planfile import PlanFile
from zerograph.core.units import format_bytes
from zerograph.dryrun.forecast import compute_dtype, movable, plan_file, refuse_offload
from zerograph.planner.estimate import RESERVE
from zerograph.planner.fill import Budget, Filled, fill
from zerograph.planner.infeasible import infeasible
from zerograph.planner.search import Search, Wish
from zerograph.steps import Steps
from zerograph.symbolic import Name

ATTEMPTS = 4
"""Solutions of which programs may turn out to hold more than the step told: a few percent, where they do."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The plan file at the largest size that fits, and what keeps it from being larger.

    Attributes:
        found: the size, and what the next one would need or why there is none.
        budget: bytes of the device, or of each tier, that the search could use: the reserve is taken off, and what the
            programs turned out to hold beyond the step.
    """

    file: PlanFile
    found: Filled
    budget: Budget


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
    offload: Offload | Literal["auto"] = "none",
) -> Steps:
    """The step of a model by batch or sequence. Stages 1 to 3 and "auto" have the same one; stage 0 has its own."""
    compute = compute_dtype(dtype, world, offload)
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
    offload: Offload | Literal["auto"] = "none",
    tier: Tier | None = None,
    **options: Any,
) -> tuple[Filled, Budget]:
    """The largest size at which a plan exists, and the bytes that it may use: of the device, or of each tier.

    Args:
        memory: bytes of the device, the reserve not taken off; ``machine``'s unless given.
        reserve: share of every tier to leave free.
        moments: tensors that the optimizer keeps per parameter, as ``steps`` were traced for.
        offload, tier: as in :class:`~zerograph.planner.search.Wish`; unless it is "none", all tiers are searched.
        options: what :func:`zerograph.backend` is told of stage, buckets, prefetch and recomputation.
    """
    wish = Wish.of(Config.of(**options), world, offload=offload, tier=tier)
    have = {t: machine.capacity(t, world) for t in TIERS} | ({} if memory is None else {"device": memory})
    budgets: dict[Tier, int] = {t: int(size * (1 - reserve)) for t, size in have.items()}
    budget: Budget = budgets["device"] if offload == "none" else budgets

    def search(size: int) -> Search:
        if offload == "none":
            return Search(steps.at(size), wish, machine, states=steps.states, moments=moments)
        return Search(movable(steps.at(size), world), wish, machine, moments=moments)

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
    offload: Offload | Literal["auto"] = "none",
    tier: Tier | None = None,
    **options: Any,
) -> Largest:
    """Plan the largest step that fits: solve for it on the traced step, then compile its programs.

    If these hold more than the machine has, it is solved again with that much less memory. Plans that offload have no
    programs: theirs is the traced step at that size.

    Args:
        what: the dimension to solve for; the other is as given, or as in the inputs that the model brings.
        name, make, machine, world, batch, seq, dtype, moments, reserve, fold, offload, tier, options: as for
            :func:`zerograph.dryrun.forecast.plan_file`.

    Raises:
        ConfigError: an offload that the stage or the machine does not allow.
        InfeasibleError: not even a size of 1 fits.
        UnsupportedError: the model cannot be traced whole, does not train, or works at one size only.
    """
    stage = options.get("stage", 3)
    refuse_offload(offload, tier, machine, world, stage)
    steps = traced(
        make, what, world=world, batch=batch, seq=seq, dtype=dtype, stage=stage, moments=moments, offload=offload
    )
    if offload != "none":
        found, budget = largest(
            steps, machine, world, moments=moments, reserve=reserve, offload=offload, tier=tier, **options
        )
        if found.value == 0:
            raise infeasible(found.search, movable(steps.at(found.next), world), machine, budget)
        file = plan_file(
            name, make, machine, world=world, batch=batch, seq=seq, dtype=dtype, moments=moments, reserve=reserve,
            sizes={what: found.value}, fold=fold, offload=offload, tier=tier, **options,
        )  # fmt: skip
        return Largest(file, found, budget)
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


def explained(what: str, found: Filled, budget: Budget) -> str:
    """The answer in words, with what keeps it from being larger."""
    if found.need is None:
        return f"largest {what}: {found.value}; {found.limit}"
    need, have = format_bytes(found.need), format_bytes(budget if isinstance(budget, int) else budget[found.tier])
    return f"largest {what}: {found.value}; {found.next} needs {need} of {found.tier} memory per rank, of {have}"
