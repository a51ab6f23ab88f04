"""Which parameters a backend has sharded, and how it comes to shard more: before the first call of a model or in it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zerograph.compiler.torch_private import traced_code
from zerograph.core.config import Config
from zerograph.core.errors import ShardingError, UnsupportedError
from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.units import format_ranks
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.runtime.joined import other_axis
from zerograph.sharding import adopt
from zerograph.sharding.gathered import is_open
from zerograph.sharding.host_parameters import outward_tier, placements_in
from zerograph.sharding.model_copies import await_updates, sharded_parameters, take_over
from zerograph.sharding.optimizer_states import early_states
from zerograph.sharding.parametrization import leave, other_names, shard_parameters
from zerograph.sharding.ranks import Ranks, will_be_alone
from zerograph.sharding.torch_private import Retrace, errors_reach_users, ignore_shard_aliasing
from zerograph.sharding.unsharded import has_opened
from zerograph.sharding.unsupported_modules import refuse_lazy

log = logging.getLogger(__name__)


class Adoption:
    """The models of one backend.

    Attributes:
        ranks: what their parameters are sharded over; None before the first model.
        params: the sharded parameters, by name.
        tied: of each that the model has several names for, the other ones.
        known: the parameters by ``id``.
        replaced: what was in their places before.
        reads: how code reads them that is not compiled; None before the first model, and in one process.
    """

    def __init__(
        self,
        config: Config,
        connect: Callable[[torch.device, Sequence[Tensor]], Ranks],
        adopted: Callable[[Iterable[nn.Parameter]], None] = lambda _: None,
        reads: Callable[[Communicator], UncompiledReads | None] = lambda _: None,
        everything: Callable[[], list[Any]] = gc.get_objects,
    ) -> None:
        """``connect`` is called once, with the device and parameters of the first model, before anything is changed;
        ``adopted`` with the sharded parameters of each model; ``reads`` gives what reads them uncompiled;
        ``everything`` the objects among which modules, optimizers and lists that hold them are looked for."""
        self._config, self._connect, self._adopted, self._new_reads = config, connect, adopted, reads
        self._everything = everything
        self.ranks: Ranks | None = None
        self.params: dict[str, nn.Parameter] = {}
        self.tied: dict[str, tuple[str, ...]] = {}
        self.known: set[int] = set()
        self.replaced = WeakIdKeyDictionary()
        self.reads: UncompiledReads | None = None
        self._traced_in_vain = False

    @property
    def communicator(self) -> Communicator | None:
        """How the ranks communicate that the model is sharded over; None before, and where there is one rank."""
        return self.ranks.communicator if self.ranks is not None else None

    @property
    def why_unsharded(self) -> str:
        """Where parameters are read until a backward ends, for people; empty where they are not."""
        if self.ranks is not None and self.ranks.mesh is None and not self._config.offloads:
            return "on one process that offloads nothing"
        return "at stage 0" if self._config.sharding == 0 else ""

    @property
    def why_reduced(self) -> str:
        """Where gradients cannot stay on each rank, for people; empty where they can."""
        config, ranks = self._config, self.ranks
        if config.sharding > 1:
            return f"at stage {config.stage}, where each rank has rows of them alone"
        if config.offloads:
            return "with offload=, which moves them to where states are updated"
        if ranks is not None and ranks.replicas > 1:
            return f"on a mesh of two axes, {ranks.replicas} replicas of {ranks.size} ranks"
        meshes = {p.device_mesh for p in self.params.values() if isinstance(p, DTensor)}
        return (
            "beside tensor parallelism, or divided experts"
            if any(other_axis(mesh) is not None for mesh in meshes)
            else ""
        )

    def complete_gradients(self) -> None:
        """Reduce with the other ranks what no backward of this one has: gradients of what ranks read as they like."""
        if self.reads is not None:
            self.reads.late.complete()

    def compiling(self, code: str) -> AbstractContextManager[None]:
        """Around a compilation: other ranks, who may wait to compare, hear when it fails here."""
        ranks = self.ranks
        if ranks is None or ranks.agreement is None or ranks.communicator is None:
            return nullcontext()
        return ranks.agreement.compiling(code, ranks.communicator)

    def before_trace(self, root: nn.Module) -> None:
        """Shard the model that is being called before Dynamo traces it, instead of after; the first call only."""
        params = list(root.parameters()) if self.ranks is None else []
        if not params or is_open(params) or any(p.is_meta or is_lazy(p) for p in params):
            return  # what is to be said about them is said where a graph reads them
        with errors_reach_users():
            adopt.refuse_wrapped([root])
            self.shard([root], params[0].device)

    def covers(self, gm: fx.GraphModule, called: nn.Module | None) -> bool:
        """Whether all parameters that a graph of Dynamo's reads are sharded, or stay plain on the one rank there is.

        False where they are plain because ``zerograph.gathered`` is open.

        Raises:
            Retrace: they were sharded now, and Dynamo has to trace the frame again.
            ShardingError: they cannot be, yet.
            UnsupportedError: they never can.
        """
        adopt.refuse_wrapped([called])  # DDP hands over pieces of its graph, without parameters
        params = adopt.parameters(gm)
        _refuse_meta(params)
        foreign = [p for p in params if id(p) not in self.known]
        if foreign:
            if is_open(foreign):
                self._refuse_first_call()
                return False
            roots = adopt.roots_of_call(gm, called)
            adopt.refuse_wrapped(roots)
            if self.shard(roots, foreign[0].device):
                self._traced_in_vain = True
                raise Retrace
            self._refuse_foreign(foreign)
        if params and has_opened(traced_code()):
            raise Retrace
        ignore_shard_aliasing()
        if self._traced_in_vain:
            gc.collect()  # the abandoned trace holds the full parameters in reference cycles
            self._traced_in_vain = False
        return True

    @torch.inference_mode(False)  # inference tensors could never be trained
    def shard(self, roots: Sequence[nn.Module], device: torch.device) -> bool:
        """Shard the parameters of ``roots`` in place; returns whether there was anything to do.

        On a lone rank without a compute dtype or offload there is not: the model stays as it is.

        Raises:
            ShardingError: some have no shape yet.
        """
        before = tuple(p for root in roots for p in root.parameters())  # not a list: those are rewritten
        if self.ranks is None:
            self.ranks = self._connect(device, before)
            if self.ranks.communicator is not None and self.ranks.mesh is not None:
                self.reads = self._new_reads(self.ranks.communicator)
        ranks = self.ranks
        if ranks.mesh is None and self._config.dtype is None and not self._config.offloads:
            return False
        refuse_lazy(roots)
        objects = adopt.instances(self._everything(), nn.Module, Optimizer)
        if ranks.agreement is not None and any(id(p) not in self.known for p in before):
            ranks.agreement.require_same(_given(self._config, roots, objects))
        # First what is sharded already: the rest then gets names beside those.
        new = take_over(roots, self._config, ranks, self.params)
        taken = {**self.params, **new}
        new |= shard_parameters(roots, self._config, ranks, objects, taken, self.reads, self._everything)
        await_updates(roots, objects)
        self.params |= new
        self.tied |= other_names(roots, new)
        self.known.update(id(p) for p in new.values())
        self._adopted(new.values())
        # Held weakly: an optimizer that still has one of these refuses to step, and nobody else asks.
        self.replaced.update((p, None) for p in before if id(p) not in self.known)
        if new:
            over = format_ranks(ranks.size, ranks.replicas)
            log.info("stage %s: sharded %d parameters over %s", self._config.stage, len(new), over)
        return bool(new)

    def late(self, plan: Plan) -> dict[str, Tier]:
        """The tiers of parameters that ``plan``, made after they were sharded, has off an accelerator, and that are
        not."""
        if self.ranks is None or self.ranks.host is None:
            return {}
        tiers = {name: outward_tier(own, self.params[name]) for name, own in placements_in(plan)}
        return {name: tier for name, tier in tiers.items() if tier != "device" and not self.params[name].is_cpu}

    @torch.inference_mode(False)
    def leave(self, tiers: Mapping[str, Tier]) -> None:
        """Take parameters off the device, to ``tiers``. Dynamo has to trace them there."""
        assert self.ranks is not None
        params = {name: self.params[name] for name in tiers}
        new = leave(params, tiers, self.ranks, adopt.live(nn.Module))
        self.replace({id(old): new[name] for name, old in params.items()})
        self._adopted(new.values())
        self.replaced.update((p, None) for p in params.values())
        self._traced_in_vain = True

    def replace(self, new: Mapping[int, nn.Parameter]) -> None:
        """Go on with other sharded parameters, given by ``id`` of those they replace."""
        for name, old in self.params.items():
            if id(old) in new:
                self.known.discard(id(old))
                self.params[name] = new[id(old)]
        self.known.update(id(p) for p in new.values())

    def skipped(self, backend: object) -> list[nn.Parameter]:
        """Parameters of models given to ``backend`` that nothing has sharded, not even the backend of a module
        around them, which Dynamo compiles them with."""
        if will_be_alone(self._config):
            return []
        given = adopt.modules_given_to(backend)
        adopt.refuse_flattened(m for m in given if self.known.isdisjoint(map(id, m.parameters())))
        sharded = self.known.union(map(id, sharded_parameters(given)))
        return [p for m in given for p in m.parameters() if id(p) not in sharded]

    def _refuse_first_call(self) -> None:
        """Dynamo would keep the plain code for calls outside; on one rank that is all there is."""
        if not self.params and not will_be_alone(self._config):
            raise ShardingError(
                "the first call of a compiled model is inside zerograph.gathered(), where parameters are plain",
                "call it once outside before, or zerograph.shard(model, backend)",
            )

    def _refuse_foreign(self, params: Sequence[nn.Parameter]) -> None:
        """Parameters of no module on the call's path would train unsynchronized."""
        if self.ranks is not None and self.ranks.mesh is not None:
            raise UnsupportedError(
                f"the compiled code reads {len(params)} parameter(s) of no module that ZeroGraph can find, "
                f"the first of shape {list(params[0].shape)}",
                "compile the module that owns them, or call zerograph.shard(module, backend) first; "
                "models wrapped or sharded by something else are not supported",
            )


def _refuse_meta(params: Sequence[nn.Parameter]) -> None:
    empty = sum(p.is_meta for p in params)
    if empty:
        raise ShardingError(
            f"{empty} of the {len(params)} parameters that the compiled code reads are on the meta device",
            "call zerograph.shard(model, backend) and then zerograph.materialize(model) before the first call",
        )


def _given(config: Config, roots: Sequence[nn.Module], objects: Sequence[Any]) -> list[str]:
    """Facts that must be equal on all ranks before anything is sharded, a line each. Budgets and batches may differ.

    All ranks average the gradients that there are already.
    """
    names = ("stage", "dtype", "reduce_dtype", "gather_wire", "reduce_wire", "bucket_size", "prefetch", "recompute")
    lines = [f"{name}={getattr(config, name)}" for name in names]
    for root in roots:
        lines += [f"parameter {n} {_described(p)}" for n, p in root.named_parameters()]
        lines += [f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in root.named_buffers()]
        lines += early_states(dict(root.named_parameters()), objects)
    return lines


def _described(param: nn.Parameter) -> str:
    notes = ["frozen"] * (not param.requires_grad) + ["with a gradient"] * (param.grad is not None)
    return ", ".join([f"{tuple(param.shape)} {param.dtype}", *notes])
