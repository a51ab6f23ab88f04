"""Which plan a frame gets: by rule, or the best that a search finds within a budget of memory.

A plan decides which collectives run, so all ranks need the same one, while their batches, and with them what they have
to fit, may differ. When a training frame is planned first, ranks tell each other what they found through the group's
key-value store and all take the plan of the rank that needs the most. Later programs of that frame (other shapes) may
be compiled by one rank alone: they keep the plan.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerograph.compiler.agreement import Agreement
from zerograph.compiler.room import Disk, room_on, rooms
from zerograph.compiler.torch_private import float32_products
from zerograph.core.config import ROOM, Config
from zerograph.core.errors import ConfigError, InfeasibleError
from zerograph.core.executable import tiers_run
from zerograph.core.layout import Layout
from zerograph.core.machine import OFFLOAD_TIERS, TIER_NAMES, TIERS, Machine, Precision, Tier, is_disk, preset_for
from zerograph.core.param_bytes import Plain, shard_bytes, state_bytes
from zerograph.core.plan import DEVICE, OFFLOADS, Placement, Plan
from zerograph.core.step import Param, Step
from zerograph.core.units import format_bytes, format_seconds
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.explain.check import require_plan
from zerograph.planner.explain.infeasible import infeasible
from zerograph.planner.explain.replay import refuse_hosts, refuse_world_size, replay, restricted_to_step
from zerograph.planner.profile.liveness import offloaded
from zerograph.planner.profile.loss import in_loss_tiles
from zerograph.planner.profile.tiling import refuse_unknown, tiles_wanted
from zerograph.planner.profile.token_tiles import in_token_tiles
from zerograph.planner.programs.placement import Shards, bytes_on
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import search_within
from zerograph.runtime.buffers import dtype_name
from zerograph.runtime.dtensors import shared_by_us

log = logging.getLogger(__name__)

Found = tuple[int, Plan]
"""The result of a search: bytes that the step needs at least, and its best plan."""

MOMENTS = 2
"""Optimizer states per parameter that a budget has to hold: Adam's. Optimizers may be made later than plans."""
_REPLAYED = "make the plan again from this model: zerograph plan MODEL -o plan.json"
_REPORT = "this is a bug in the planner: report it with this message and the arguments of zerograph.backend"


class Planner:
    """Plans the frames of one model.

    Attributes:
        machine: that forecasts go by, with as many ranks on each host as there are.
        searched: bytes that the last plan found by a search was predicted to need.
        room: bytes that each rank may use of each tier beside the device.
    """

    def __init__(
        self,
        config: Config,
        world_size: int,
        params: Mapping[str, nn.Parameter],
        device: torch.device,
        agreement: Agreement | None = None,
        moments: int = MOMENTS,
        free: Mapping[Tier, Sequence[Disk]] | None = None,
        replicas: int = 1,
        per_host: int | None = None,
    ) -> None:
        """All ranks call this together: the smallest budgets of all count.

        Args:
            params: the sharded parameters of the model by name, now and later.
            device: where the model lives.
            moments: tensors that the optimizer keeps per parameter.
            free: the free memory of tiers that ranks share, for what leaves the device; others are not looked at.
            replicas: ranks that hold the same shards.
            per_host: ranks of each host, where all share memory or are joined in two levels; else None.

        Raises:
            ConfigError: the plan to replay is for another number of ranks, or something is to be searched without
                ``memory`` on a CPU, of which other processes need their share.
        """
        # Before the first frame: a plan for other ranks would be found wrong only after minutes of tracing.
        if config.plan is not None:
            refuse_world_size(config.plan, world_size, replicas)
        self._config, self._world_size, self._replicas, self._params = config, world_size, replicas, params
        self._agreement, self._moments = agreement, moments
        self.searched = 0
        self._plans: dict[tuple[str, tuple[Param, ...]], Plan] = {}
        self._found: tuple[Step, Found] | None = None  # by the last search
        self._asked: Counter[str] = Counter()
        self.machine = machine_of(config, device)
        self._hosts = 1
        if per_host is not None:
            self.machine = replace(self.machine, ranks_per_node=per_host)
            self._hosts = max(1, world_size // per_host)  # each group of ranks that split a model is on so many
        if config.plan is not None:
            refuse_hosts(config.plan, self._hosts)
        self._budget, self.room = 0, dict.fromkeys(TIERS[1:], sys.maxsize)
        self._whose: dict[Tier, str] = {}  # room it is, where ranks have different ones
        if config.searches or config.offload_tiers:
            self._learn_budgets(device, free or {})

    def _learn_budgets(self, device: torch.device, free: Mapping[Tier, Sequence[Disk]]) -> None:
        config = self._config
        memory = config.memory
        # A GPU is this rank's alone; a CPU's memory is shared with other ranks, so that its part must be given.
        if memory is None and device.type == "cuda":
            memory = room_on(device)
        if memory is None and config.searches:
            asked = 'stage="auto"' if config.stage == "auto" else 'offload="auto"'
            raise ConfigError(
                f"{asked} on {device.type} needs to be told how much memory a rank may use",
                f'for example zerograph.backend({asked}, memory="8GiB")',
            )
        ranks = self._agreement.world_size if self._agreement is not None else self._world_size * self._replicas
        host = self.machine.capacity("host", ranks)  # ranks beside tensor parallelism share it too
        most = {tier: config.room(tier) or (host if tier == "host" else sys.maxsize) for tier in OFFLOAD_TIERS}
        mine: dict[str, Any] = {"memory": memory, "most": most, "free": free}
        reports = self._agreement.gather("budget", mine) if self._agreement is not None else [mine]
        if memory is not None:
            self._budget = int(self._least("device", [one["memory"] for one in reports]) * (1 - RESERVE))
        for tier in OFFLOAD_TIERS:
            room = rooms([one["free"].get(tier, ()) for one in reports])
            most_by_rank = (one["most"][tier] for one in reports)
            self.room[tier] = self._least(tier, [*map(min, room, most_by_rank)])

    def _least(self, tier: Tier, by_rank: Sequence[int]) -> int:
        """The smallest: all ranks run one plan, which must fit each of them."""
        least = min(by_rank)
        if least < max(by_rank):
            assert self._agreement is not None  # else there is one rank
            self._whose[tier] = self._agreement.rendezvous.roster.named([by_rank.index(least)])
        return least

    def _whose_room(self) -> str:
        """Which ranks have the least room, behind what says that something does not fit."""
        return "".join(f"; {rank} has the least {tier} memory of all ranks" for tier, rank in self._whose.items())

    def plan(self, code: str, step: Step, plain: Sequence[Plain]) -> Plan:
        """The plan for ``step``; nothing of it has been carried out yet.

        Args:
            code: the user's function that performs it.
            plain: the user's own parameters that it reads.

        Raises:
            ConfigError: the plan to replay was made for another step.
            InfeasibleError: nothing fits the budget.
            InvariantError: the plan, wherever it comes from, cannot be carried out.
        """
        if step.params:
            refuse_unknown(self._config.tile, {**self._params, **{p.name: p for p in step.params}})
        found = self._decided(code, step, plain)
        # A plan that is replayed keeps what it says, but for parts of a batch that is another one here.
        if self._config.plan is None or found.by_sample:
            found = restricted_to_step(found, step)
        require_plan(step, found, _REPLAYED if self._config.plan is not None else _REPORT)
        if step.training:
            self._require_room_of(step, found)
        return found

    def _require_room_of(self, step: Step, plan: Plan) -> None:
        saved = offloaded(step, plan)
        for tier in OFFLOAD_TIERS:
            sizes = bytes_on(tier, plan, self._moments, self.staging)
            self._require_room(tier, sizes | {"activations": saved.get(tier, 0)})

    def _require_room(self, tier: Tier, sizes: Mapping[str, int]) -> None:
        """Refuse what takes more room off the device than there is, on all ranks alike: they count the largest shards,
        and know the least room of all.

        Args:
            sizes: bytes by what they are for.
        """
        need, have = sum(sizes.values()), self._room_on(tier)
        if need <= have:
            return
        parts = ", ".join(f"{format_bytes(size)} of {what}" for what, size in sizes.items() if size)
        enough = repr(f"{-(-need // int((1 - RESERVE) * 2**20))}MiB")
        where, more = (TIER_NAMES[tier], " in folders that have it") if is_disk(tier) else (f"the {tier}", "")
        raise InfeasibleError(
            f"the plan keeps {format_bytes(need)} on {where} per rank ({parts}) "
            f"and may use {format_bytes(have)}, the reserve taken off{self._whose_room()}",
            f"give each rank {ROOM[tier]}={enough}{more}, offload less, or use more ranks",
        )

    def _room_on(self, tier: Tier) -> int:
        return int(self.room[tier] * (1 - RESERVE))

    @property
    def staging(self) -> Tier:
        """The tier whose memory disks read and write."""
        return self.machine.staging

    def budget(self, step: Step | None = None) -> int | dict[Tier, int]:
        """Bytes that a searched plan may need: of the device, or of each tier where something may leave it.

        Args:
            step: that is planned; without it what it could save is not counted.
        """
        if self._config.offload == "none":
            return self._budget
        # No more than could ever go there, so that plans do not depend on what else is on a disk with room enough.
        most = sum(p.numel() * (p.element_size() + 4) * (self._moments + 3) for p in self._params.values())
        most += sum(value.bytes for value in step.values) if step is not None else 0
        return {"device": self._budget, **{tier: min(self._room_on(tier), most) for tier in OFFLOAD_TIERS}}

    def placement_before(self) -> Placement:
        """Where parameters are materialized, before anything is planned.

        The choice of ``offload="auto"`` is not known then: they begin on NVMe where memory cannot hold them all.

        Raises:
            InfeasibleError: NVMe cannot hold them.
        """
        placement, params = placement_of(self._config), [self._param(name, p) for name, p in self._params.items()]
        if self._config.offload == "auto" and sum(shard_bytes(p) for p in params) > self._budget:
            placement = farthest(self._config)
        if is_disk(placement.parameters):
            placed = Shards.of(params, self._moments, self.staging).at(placement)
            # Values lie apart at first, and are then copied to their buckets' places.
            sizes = {
                "parameters": placed.parameters, "parameters until the first plan": placed.left,
                "optimizer states": placed.optimizer,
            }  # fmt: skip
            self._require_room(placement.parameters, sizes)
        return placement

    def _decided(self, code: str, step: Step, plain: Sequence[Plain]) -> Plan:
        if self._config.plan is not None:
            return replace(replay(self._config.plan, step), replicas=self._replicas)  # which change no segment
        if not self._config.searches or not step.training:
            return self._by_rule(step)
        # Without the batch's shapes: a rank that compiles another shape alone must keep the collectives agreed on.
        key = (code, step.params)
        if key not in self._plans:
            self._plans[key] = self._agreed(code, step, self.states(step, plain))
        return self._plans[key]

    @property
    def facts(self) -> str:
        """All that plans depend on besides the step: with the same facts a step gets the same plan."""
        config = {f.name: getattr(self._config, f.name) for f in fields(self._config) if f.name != "mesh"}
        facts: list[object] = [config | {"given": sorted(self._config.given)}]
        facts += [self._world_size, self._replicas, self._hosts, self._moments]
        if self._config.searches:
            facts += [self.budget(), self.machine, [self._param(name, p) for name, p in self._params.items()]]
        return repr(facts)

    def found(self, step: Step) -> Found | None:
        """The result of the search for this very ``step``; None where it has its plan from elsewhere."""
        return self._found[1] if self._found is not None and self._found[0] is step else None

    def plans_again(self, code: str, step: Step, plain: Sequence[Plain], plan: Plan, found: Found | None) -> bool:
        """Whether ``step`` gets ``plan`` again, as in an earlier process with the same facts, which had ``found`` it.

        Where plans are searched, other ranks may be searching: this one then takes part in their agreement.
        """
        if not self._config.searches or not step.training:
            if step.training:
                self._require_room_of(step, plan)
            return True
        if found is not None:
            self._found = (step, found)
        elif (code, step.params) not in self._plans:
            return False
        return self.plan(code, step, plain) == plan

    def _agreed(self, code: str, step: Step, states: int) -> Plan:
        agreement = self._agreement
        if agreement is None:
            return self._search(step, states)[1]
        if not step.params:  # no collectives: nothing to agree on, and other ranks may not compile this
            return self._without_collectives(step, states)
        question = f"plan {code} #{self._asked[code] + 1}"
        try:
            need, plan = self._search(step, states)
        except Exception as error:
            agreement.broadcast(
                question, {"failure": str(error).partition("\n\n")[0], "hint": getattr(error, "hint", "")}
            )
            # That nothing fits is an answer like others: all ranks hear all answers, and raise for the same rank.
            if not isinstance(error, InfeasibleError):
                self._asked[code] += 1
                raise
        else:
            agreement.broadcast(f"{question}: text", plan.to_json())
            agreement.broadcast(question, {"need": need})
        found = [agreement.receive(question, rank) for rank in range(agreement.world_size)]
        # Every rank asks as often, as a failure is one for all; one that was interrupted before asks the same again.
        self._asked[code] += 1
        for rank, answer in enumerate(found):
            if "failure" in answer:
                raise InfeasibleError(f"on rank {rank} {answer['failure']}{self._whose_room()}", answer["hint"])
        # Of equal needs the lowest rank's, so that every rank takes the same plan.
        most = max(range(len(found)), key=lambda rank: (found[rank]["need"], -rank))
        return _of_this_rank(Plan.from_json(agreement.receive(f"{question}: text", most)), step)

    def _without_collectives(self, step: Step, states: int) -> Plan:
        try:
            return self._search(step, states)[1]
        except InfeasibleError as error:
            log.warning("%s; this graph holds no parameters and is planned by rule, so that no rank waits", error)
            return self._by_rule(step)

    def _by_rule(self, step: Step) -> Plan:
        config = self._config
        plan = plan_step(
            step,
            stage=config.sharding,
            world_size=self._world_size,
            bucket_size=config.bucket_size,
            prefetch=config.prefetch,
            recompute=config.recomputed,
            placement=placement_of(config) if step.training else DEVICE,
            saved=config.saved,
            update="device" if config.update == "device" and step.training else "host",
            tiles=tiles_wanted(config.tile, step, config.bucket_size),
            replicas=self._replicas,
            hosts=self._hosts,
            whole_layers=config.by_sample,
        )
        if config.loss_tiles != "auto":
            plan = in_loss_tiles(plan, step, config.loss_tiles)
        if config.layer_tiles != "auto" and step.training:
            plan = in_token_tiles(plan, step, config.layer_tiles, config.by_sample)
        return plan

    def _search(self, step: Step, states: int) -> Found:
        known = self.found(step)
        if known is None:
            known = self._searched(step, states)
            self._found = (step, known)
        return known

    def _searched(self, step: Step, states: int) -> Found:
        runs = tiers_run(self.machine, self._config.folders)
        constraints = Constraints.of(
            self._config, self._world_size, replicas=self._replicas, hosts=self._hosts, executable=runs
        )
        budget = self.budget(step)
        search, found = search_within(step, constraints, self.machine, budget, states=states, moments=self._moments)
        if found is None:
            raise infeasible(search, step, self.machine, budget)
        self.searched = found.peak
        log.info(
            "plan: %s predicted per step, peak %s of %s",
            format_seconds(found.seconds),
            format_bytes(found.peak),
            format_bytes(self._budget),
        )
        return search.smallest.peak, found.plan

    def states(self, step: Step, plain: Sequence[Plain]) -> int:
        """Bytes between steps: shards and optimizer states of the whole model, whatever this frame reads of it."""
        if not self._params:  # one rank: parameters and their gradients are the user's own
            return sum(size * (1 + (self._moments + 1) * trained) for size, trained in plain)
        known = {param.name: param for param in step.params}
        params = [known[name] if name in known else self._param(name, p) for name, p in self._params.items()]
        return sum(state_bytes(params, self._moments))

    def _param(self, name: str, param: nn.Parameter) -> Param:
        """A parameter that this frame does not read."""
        dtype, shape, home = dtype_name(param.dtype), tuple(param.shape), Layout("whole", self._world_size)
        if isinstance(param, DTensor):
            shape, home = shared_by_us(param)
        experts = self._world_size // home.ranks
        return Param(name, shape, dtype, dtype, dtype, param.requires_grad, home, experts=experts)


def _of_this_rank(plan: Plan, step: Step) -> Plan:
    """``plan`` with the parameters of ``step``, whose parts may have other shapes beside tensor parallelism."""
    own = {param.name: param for param in step.params}
    buckets = [replace(one, params=tuple(own.get(p.name, p) for p in one.params)) for one in plan.buckets]
    return replace(plan, buckets=tuple(buckets))


def placement_of(config: Config) -> Placement:
    """Where ``offload`` and ``tier`` put all shards, or a plan that is replayed, where it puts all alike; what
    ``offload="auto"`` chooses is known once a step is planned."""
    if config.plan is not None:
        placements = {bucket.placement for bucket in config.plan.plan.buckets}
        return placements.pop() if len(placements) == 1 else DEVICE
    if config.offload == "auto":
        return DEVICE
    return _offloaded(config, OFFLOADS.index(config.offload))


def farthest(config: Config) -> Placement:
    """The farthest placement that a plan may give: all that the stage shards leaves, where plans choose that."""
    return _offloaded(config, config.sharding) if config.offload == "auto" else placement_of(config)


def _offloaded(config: Config, level: int) -> Placement:
    """Placement of what leaves at so many of :data:`~zerograph.core.plan.OFFLOADS`, each with those before it."""
    return Placement(**dict.fromkeys(OFFLOADS[1 : level + 1], config.target))


def machine_of(config: Config, device: torch.device) -> Machine:
    """The machine that forecasts go by: the user's, or the preset closest to ``device``, as torch computes float32
    products now."""
    machine = config.machine
    if machine is None:
        name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
        machine = preset_for(device.type, name)
    return machine.with_precision(_precision())


def _precision() -> Precision:
    """The precision of float32 products on CUDA."""
    return "high" if float32_products()[0] == "tf32" else "highest"


def plain(params: Iterable[nn.Parameter]) -> tuple[Plain, ...]:
    """The facts that a plan needs of parameters that nothing shards."""
    return tuple(Plain(p.numel() * p.element_size(), p.requires_grad) for p in params if not isinstance(p, DTensor))
