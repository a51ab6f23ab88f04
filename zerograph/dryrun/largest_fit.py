"""The largest batch or sequence of a model that fits a machine: probed on a few traces, then compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zerograph.core.config import Config
from zerograph.core.errors import InfeasibleError, UnsupportedError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.garbage import without_gc
from zerograph.core.machine import Machine, Tier
from zerograph.core.plan import Offload, Overlap, Update
from zerograph.core.step import Dimension, Step
from zerograph.core.units import format_bytes
from zerograph.dryrun.compile_only import Compiled, compile_only, tracing
from zerograph.dryrun.forecast import forecast_file, refuse_offload, torch_compute_dtype
from zerograph.dryrun.traced_steps import Steps
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.explain.infeasible import infeasible
from zerograph.planner.explain.plan_file import file_from_search
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.largest_size import MOST, Budget, LargestSize, fullest, largest_size
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import Candidate

ATTEMPTS = 4
"""Sizes whose programs are compiled: they may turn out to hold more than the step says, a few percent where they do."""


@dataclass(frozen=True, slots=True)
class LargestPlan:
    """The plan file at the largest size that fits, and what keeps it from being larger.

    Attributes:
        found: the size, and what the next one would need or why there is none.
        budget: bytes of the device, or of each tier, that the search could use: the reserve is taken off, and what the
            programs turned out to hold beyond the step.
    """

    file: PlanFile
    found: LargestSize
    budget: Budget


class Probe:
    """Plans for a model's step by size, each searched once.

    Attributes:
        steps: of the model.
        constraints: what is searched for at every size.
        moments: tensors that the optimizer keeps per parameter.
    """

    def __init__(self, steps: Steps, machine: Machine, constraints: Constraints, moments: int = 2) -> None:
        self.steps, self.constraints, self.moments = steps, constraints, moments
        self._machine = machine
        self._known: dict[int, tuple[Step, Search]] = {}

    def step(self, size: int) -> Step:
        """The step at ``size``, with parameters that can leave the device where plans may offload."""
        step = self.steps.at(size)
        return step if self.constraints.offload == "none" else step.movable(self.constraints.world_size)

    def search(self, size: int) -> Search:
        """The plans at ``size``."""
        step = self.step(size)
        known = self._known.get(size)
        if known is None or known[0] != step:
            states = self.steps.states if self.constraints.offload == "none" else None
            # With other tiers a thorough search takes seconds, and what fits is found nearly as well by the plans that
            # need least, which every search looks at first.
            search = Search(
                step,
                self.constraints,
                self._machine,
                states=states,
                moments=self.moments,
                thorough=self.constraints.offload == "none",
            )
            known = self._known[size] = step, search
        return known[1]

    def solve(self, budget: Budget) -> LargestSize:
        """The largest size within ``budget``, by what :attr:`steps` tell."""
        size = self.steps.start
        with without_gc():
            if len(self.steps.tokens) == 1:
                self.steps.confirm(_guess(self.search(size), budget, size))
            return largest_size(self.search, budget, list(self.steps.tokens)[-1])

    def largest(self, budget: Budget) -> LargestSize:
        """The same, of which both it and the next size were traced."""
        while True:
            found = self.solve(budget)
            if all(self.steps.confirm(size) for size in (found.value, found.next) if size):
                return found

    def infeasible(self, found: LargestSize, budget: Budget) -> Exception:
        """The error where no size fits."""
        return infeasible(found.search, self.step(found.next), self._machine, budget)


def _guess(search: Search, budget: Budget, size: int) -> int:
    """A multiple of ``size``, at which ``search`` was, that fills the budget where needs are in proportion."""
    _, need, tier = fullest(search, budget)
    held = search.closest(budget).held if tier == "device" else 0
    have = budget if isinstance(budget, int) else budget[tier]
    return size * min(max(2, (have - held) // max(1, need - held)), MOST // size)


def probe(
    make: Callable[[], Any],
    what: Dimension,
    machine: Machine,
    *,
    world: int,
    batch: int,
    seq: int,
    replicas: int = 1,
    dtype: str | None = None,
    moments: int = 2,
    repeat_layers: bool = True,
    offload: Offload | Literal["auto"] = "none",
    tier: Tier | None = None,
    overlap: Overlap | Literal["auto"] = "none",
    update: Update | Literal["auto"] = "host",
    device: str = "cpu",
    **options: Any,
) -> Probe:
    """The plans of a model by batch or sequence; see :func:`largest_file`."""
    config = Config.of(**options)
    asked: dict[str, Any] = {"offload": offload, "tier": tier, "overlap": overlap, "update": update}
    constraints = Constraints.of(config, world, replicas=replicas, hosts=machine.hosts(world), **asked)
    compute = torch_compute_dtype(dtype, world, offload)
    steps = Steps(
        make, what, world=world, batch=batch, seq=seq, dtype=compute, moments=moments, repeat_layers=repeat_layers,
        device=device, **tracing(config),
    )  # fmt: skip
    return Probe(steps, machine, constraints, moments)


def largest_by_stage(
    make: Callable[[], Any],
    what: Dimension,
    machine: Machine,
    stages: Sequence[Literal[0, 1, 2, 3]],
    *,
    reserve: float = RESERVE,
    **options: Any,
) -> dict[int, tuple[LargestSize, Budget]]:
    """The largest size by stage, and the bytes of the device, or of each tier, that it may use.

    Args:
        stages: all of them shard, or there is one: these have the same traces.
        options: see :func:`largest_file`.
    """
    first = probe(make, what, machine, stage=stages[0], **options)
    have = machine.budget(first.constraints.ranks, reserve)
    budget: Budget = have["device"] if first.constraints.offload == "none" else have
    plans = {
        stage: Probe(first.steps, machine, replace(first.constraints, stage=stage), first.moments) for stage in stages
    }
    return {stage: (one.largest(budget), budget) for stage, one in plans.items()}


def largest_file(
    name: str,
    make: Callable[[], Any],
    machine: Machine,
    what: Dimension,
    *,
    world: int = 1,
    replicas: int = 1,
    batch: int = 1,
    seq: int = 1024,
    dtype: str | None = None,
    moments: int = 2,
    reserve: float = RESERVE,
    repeat_layers: bool = True,
    offload: Offload | Literal["auto"] = "none",
    tier: Tier | None = None,
    overlap: Overlap | Literal["auto"] = "none",
    update: Update | Literal["auto"] = "host",
    **options: Any,
) -> LargestPlan:
    """Plan the largest step that fits: solve for it on a few traces, then compile its programs.

    If these hold more than the machine has, it is solved again with that much less memory. Plans that offload have no
    programs: theirs is the traced step at that size.

    Args:
        what: the dimension to solve for; the other is as given, or as in the inputs that the model brings.
        name, make, machine, world, replicas, batch, seq, dtype, moments, reserve, repeat_layers, offload, tier,
            overlap, update, options: as for :func:`zerograph.dryrun.forecast.plan_file`.

    Raises:
        ConfigError: an offload that the stage or the machine does not allow.
        InfeasibleError: not even a size of 1 fits.
        UnsupportedError: the model cannot be traced whole, does not train, or works at one size only.
    """
    refuse_offload(offload, tier, machine, world * replicas, options.get("stage", 3), overlap, update)
    model: dict[str, Any] = {"batch": batch, "seq": seq, "moments": moments, "repeat_layers": repeat_layers}
    asked: dict[str, Any] = {"offload": offload, "tier": tier, "overlap": overlap, "update": update}
    plans = probe(make, what, machine, world=world, replicas=replicas, dtype=dtype, **asked, **model, **options)
    if offload != "none":
        budget = machine.budget(plans.constraints.ranks, reserve)
        found = plans.largest(budget)
        if found.value == 0:
            raise plans.infeasible(found, budget)
        file = file_from_search(
            name, plans.step(found.value), plans.constraints, machine, moments=moments, reserve=reserve,
            tokens=plans.steps.tokens[found.value], unit=plans.steps.unit,
        )  # fmt: skip
        return LargestPlan(file, found, budget)

    def compiled(size: int, memory: int) -> Compiled:
        return compile_only(
            make, world_size=world, replicas=replicas, sizes={what: size},
            dtype=torch_compute_dtype(dtype, world, offload), memory=memory, machine=machine,
            per_host=machine.per_host(world), **model, **options,
        )  # fmt: skip

    return _compiled(plans, compiled, name, machine, reserve)


def _compiled(
    plans: Probe, compiled: Callable[[int, int], Compiled], name: str, machine: Machine, reserve: float
) -> LargestPlan:
    """The largest size whose programs fit too.

    Args:
        compiled: the programs at a size, of the fastest plan within so many bytes.
    """
    ranks, attempts, excess = plans.constraints.ranks, 0, 0.0
    memory, have = machine.capacity("device", ranks), machine.budget(ranks, reserve)["device"]
    while True:
        found, plan, memory = _solved(plans, memory, have, excess)
        budget = _of_backend(memory)
        try:
            programs = compiled(found.value, memory)
        except (InfeasibleError, UnsupportedError):
            if plans.steps.confirm(found.value):
                raise
            continue  # the step there is another one than was interpolated
        attempts += 1
        plans.steps.learn(found.value, programs)
        file = forecast_file(name, programs, machine, moments=plans.moments, reserve=reserve)
        need = file.forecast.peaks["device"].bytes
        if need <= have:
            confirmed = plans.largest(budget)
            # Learning the programs' step may have moved what the traces tell: the answer must hold with it.
            if confirmed.value == found.value:
                return LargestPlan(file, confirmed, budget)
        else:
            excess = (need - plan.peak) / found.value
            # Less by what the programs overran; one byte less at least, so that it ends.
            memory = memory * have // need - 1
        if attempts == ATTEMPTS:
            return LargestPlan(file, found, budget)


def _solved(plans: Probe, memory: int, have: int, excess: float) -> tuple[LargestSize, Candidate, int]:
    """The largest size for a backend of at most ``memory`` bytes whose programs may be taken to fit into ``have``; its
    plan, and the memory that it is the plan for.

    Args:
        excess: bytes that programs held beyond the step, per unit of its size.
    """
    while True:
        budget = _of_backend(memory)
        found = plans.solve(budget)
        plan = found.search.within(budget)
        if plan is None:
            raise plans.infeasible(found, budget)
        expected = plan.peak + int(excess * found.value)
        if not excess or expected <= have:
            return found, plan, memory
        memory = memory * have // expected - 1


def _of_backend(memory: int) -> int:
    """The bytes that a backend of that ``memory`` fills."""
    return int(memory * (1 - RESERVE))


def describe_answer(what: str, found: LargestSize, budget: Budget) -> str:
    """The answer in words, with what keeps it from being larger."""
    if found.need is None:
        return f"largest {what}: {found.value}; {found.limit}"
    need, have = format_bytes(found.need), format_bytes(budget if isinstance(budget, int) else budget[found.tier])
    return f"largest {what}: {found.value}; {found.next} needs {need} of {found.tier} memory per rank, of {have}"
