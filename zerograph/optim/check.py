"""Watch the steps of optimizers: refuse those that would compute something else on shards than on whole parameters, or
on too few of them; mark them for a recording; tell native ones how ranks communicate, and the other ranks of any that
fails."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import traceback
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerograph.core.errors import ConfigError, UnsupportedError, ZeroGraphError
from zerograph.optim.algorithms.stock import make_states
from zerograph.optim.host import HostOptimizer
from zerograph.optim.overlap import EarlySteps, overlapping
from zerograph.optim.replicated import refuse_different_gradients, warn_of_unaveraged_gradients
from zerograph.optim.tensors import names_in
from zerograph.optim.torch_private import register_failed_step_hook
from zerograph.runtime import delayed
from zerograph.runtime.assigned import refuse_assigned
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import reason_of
from zerograph.runtime.dtensors import is_sharded
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.residency import StepCount, moving_groups, params_in
from zerograph.runtime.executor.telemetry import Telemetry
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.torch_private import handle_op

_NOT_ELEMENTWISE = {
    "LBFGS": "it works on the dot products of whole gradients",
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "it factors rows and columns of whole matrices",
    "Rprop": "it writes through index masks, which DTensor cannot",
    "SparseAdam": "it needs sparse gradients",
}
_ELEMENTWISE = "use an elementwise optimizer (AdamW, Adam, SGD, Adagrad, Lion, ...), or stage=0"
_NOT_FUSED = {"SGD", "Adagrad"}
_STEPPING: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Others' optimizers of sharded parameters, while they step: of all backends, as is the operator that asks."""


class OptimizerCheck:
    """Looks at every optimizer before its first step, and again when its backend has sharded more since, or more of
    what it has not sharded has gradients."""

    def __init__(
        self,
        params: Collection[int],
        replaced: Container[Tensor],
        skipped: Callable[[], Iterable[Tensor]],
        accumulation: GradientAccumulation,
        telemetry: Telemetry,
        communicator: Callable[[], Communicator | None],
        store: ShardStore,
        steps: StepCount,
        complete: Callable[[], None] = lambda: None,
        why_reduced: Callable[[], str] = lambda: "",
    ) -> None:
        """``params`` are the ids of the backend's own, ``replaced`` what was in their places before, ``skipped`` finds
        those that should be its own and are not, ``communicator`` how the ranks communicate that hold them, ``store``
        knows where their states live, ``steps`` counts what the ranks have taken alike, ``complete`` completes their
        gradients, ``why_reduced`` says where gradients cannot stay on each rank.
        """
        self._telemetry, self._communicator, self._store, self._steps = telemetry, communicator, store, steps
        self._complete, self._why_reduced = complete, why_reduced
        self._params, self._replaced, self._skipped, self._accumulation = params, replaced, skipped, accumulation
        self._passed: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._compared: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # On its way to the caller, through the steps of optimizers around one another.
        self._refused: weakref.ref[ZeroGraphError] | None = None
        _CHECKS[self] = None
        _watch_steps()
        handle_op(torch.ops.aten._local_scalar_dense.default, _refuse_own_number)

    def begins(self, optimizer: Optimizer, *, has_closure: bool = False) -> None:
        """A step begins. If it ``has_closure``, it begins again whenever that has returned: a closure may be the first
        call of a model, or the last micro-batch of several, so that gradients are looked at then.
        """
        try:
            if has_closure:
                self._look_at_parameters(optimizer)
            else:
                self.look_at(optimizer)
        except ZeroGraphError as error:
            self._refused = weakref.ref(error)
            raise
        ranks = self._communicator()
        if ranks is not None and isinstance(optimizer, HostOptimizer):
            averages = optimizer.takes_local_gradients and self.holds_own(optimizer)
            if averages or any(map(is_sharded, self._own(optimizer))):
                optimizer.communicator = weakref.ref(ranks)
        if isinstance(optimizer, HostOptimizer) and optimizer.stages in self._steps.pipelines:
            optimizer.pipelines = self._steps.pipelines  # whatever it holds: all stages add up alike
        if self.holds_own(optimizer):
            if moving_groups(optimizer.param_groups):
                self._complete()
            delayed.settle(params_in(optimizer.param_groups))
            if isinstance(optimizer, HostOptimizer):
                optimizer.steps, optimizer.accumulation = self._steps, self._accumulation
            elif not any(group.get("fsdp_in_use") for group in optimizer.param_groups):  # which adds up over ranks
                _STEPPING.add(optimizer)
            self._refuse_updated(optimizer)
            self._bring_states_back(optimizer)
            if not has_closure:
                self._telemetry.updating()

    def _refuse_updated(self, optimizer: Optimizer) -> None:
        own = {id(p) for p in params_in(optimizer.param_groups)}
        for early in overlapping():
            if early is not getattr(optimizer, "early", None) and own & early.updated:
                early.abandon(f"{type(optimizer).__name__}.step() found its parameters updated by another optimizer")
                raise ZeroGraphError(
                    f"{early} with overlap=True, which still lives, has updated parameters of this "
                    f"{type(optimizer).__name__} inside of the backward",
                    "let go of it (del optimizer; gc.collect()) before the backward, and load a checkpoint",
                )

    def overlapping(self, why_unsharded: str = "") -> list[EarlySteps]:
        """The optimizers that update parameters of the backend inside of backwards, looked at as before a step.

        Raises:
            ConfigError: there are some, and ``why_unsharded`` says where parameters are read until a backward ends.
        """
        found = []
        for early in overlapping():
            optimizer = early.optimizer
            if isinstance(optimizer, Optimizer) and self.holds_own(optimizer):
                self._look_at(optimizer, in_step=False)
                self._bring_states_back(optimizer)
                found.append(early)
        if found and why_unsharded:
            raise ConfigError(
                f"{found[0]}(overlap=True) {why_unsharded}, where parameters are read until a backward ends",
                "leave overlap out there; it needs stage 1, 2 or 3 on several processes, or offload=",
            )
        return found

    def _bring_states_back(self, optimizer: Optimizer) -> None:
        """Let ``optimizer`` keep states where the backend says."""
        if not isinstance(optimizer, HostOptimizer):
            if self._store.room.opened is not None:
                make_states(optimizer, self._store)
            return
        known, mine = optimizer.store, self._store
        if known is not None and known is not mine and mine.room.opened is not None:
            own = {id(p) for p in params_in(optimizer.param_groups)}
            if own & (known.locations.places().keys() - mine.locations.places().keys()):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} holds parameters of two backends that keep states on NVMe",
                    "make an optimizer for each model",
                )
        if known is None or mine.room.opened is not None or mine.locations.host is not None:
            optimizer.store = mine

    def ended(self, optimizer: Optimizer) -> None:
        """A step has returned."""
        if self.holds_own(optimizer):
            self._telemetry.updated()
            if not isinstance(optimizer, HostOptimizer):
                self._store.copies.touched(params_in(optimizer.param_groups))

    def loaded(self, optimizer: Optimizer) -> None:
        """A checkpoint was loaded into it."""
        self._steps.begin_again()
        self._store.half_done.pop(optimizer, None)

    def failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """The update is a program of all ranks: those that wait for this one hear of its error at once, the others at
        their next program. A step that is refused has not begun, and a caller that catches that can mend and repeat it.
        """
        if self._refused is not None and self._refused() is error:
            return
        reason = f"in {type(optimizer).__name__}.step(): {reason_of(error)}"
        try:
            for pipeline in self._steps.pipelines_of(optimizer).values():
                pipeline.stop(reason)
        finally:  # ranks of the same stage hear of it anyhow
            self._tell_ranks(optimizer, reason)

    def _tell_ranks(self, optimizer: Optimizer, reason: str) -> None:
        if not self.holds_own(optimizer):
            return
        self._telemetry.updated()
        ranks = self._communicator()
        if ranks is not None:
            ranks.abort(reason)

    def _own(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """The parameters of the backend that ``optimizer`` updates."""
        return (p for p in params_in(optimizer.param_groups) if id(p) in self._params)

    def holds_own(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` updates parameters of the backend."""
        return any(True for _ in self._own(optimizer))

    def look_at(self, optimizer: Optimizer) -> None:
        """Raises:
        UnsupportedError: ``optimizer`` holds sharded parameters of this backend and is not elementwise, or
            parameters that should be sharded and are not.
        ShardingError: the ``.data`` of a sharded parameter was assigned, which does nothing.
        ZeroGraphError: a part of the gradients is held back.
        """
        if not moving_groups(optimizer.param_groups):
            return
        takes = isinstance(optimizer, HostOptimizer) and optimizer.takes_local_gradients
        if self._accumulation.names and self.holds_own(optimizer) and not (takes and self._accumulation.taker):
            self._accumulation.refuse_step()
        self._look_at(optimizer)

    def _look_at_parameters(self, optimizer: Optimizer) -> None:
        """As :meth:`look_at`, but for gradients, which are still to come."""
        if moving_groups(optimizer.param_groups):
            refuse_assigned(self._own(optimizer))
            self._refuse_replaced(optimizer)
            self._refuse_not_elementwise(optimizer)

    def _look_at(self, optimizer: Optimizer, *, in_step: bool = True) -> None:
        # Frozen models and targets are in no optimizer: the first one looks at all parameters.
        first = next(iter(self._passed), optimizer) is optimizer and self.holds_own(optimizer)
        refuse_assigned(None if first else self._own(optimizer))
        foreign = {id(p) for p in params_in(optimizer.param_groups) if id(p) not in self._params and p.grad is not None}
        known, looked_at = self._passed.get(optimizer), (len(self._params), len(foreign))
        if known is not None and known[0] == looked_at[0] and known[1] >= looked_at[1]:
            return
        self._refuse_replaced(optimizer)
        self._refuse_skipped(optimizer, foreign)
        self._refuse_not_elementwise(optimizer)
        if isinstance(optimizer, HostOptimizer) and optimizer.takes_local_gradients and self.holds_own(optimizer):
            self._refuse_local_gradients(optimizer, len(foreign))
        names = itertools.chain.from_iterable(names_in(group).items() for group in optimizer.param_groups)
        refuse_different_gradients(self._own(optimizer), dict(names))
        if in_step and self._compared.get(optimizer) != len(self._params):  # else inside of a program
            self._warn_of_unaveraged(optimizer)
            self._compared[optimizer] = len(self._params)
        if optimizer not in self._passed:
            check = weakref.ref(self)  # an optimizer may outlive the backend

            def after_load(loaded: Optimizer) -> None:
                live = check()
                if live is not None:
                    live.loaded(loaded)

            with contextlib.suppress(AttributeError):  # wrappers, as timm's Lookahead, leave Optimizer.__init__ out
                optimizer.register_load_state_dict_post_hook(after_load)
        self._passed[optimizer] = looked_at

    def stepped(self) -> list[Optimizer]:
        """The optimizers that have stepped on parameters of the backend."""
        return [o for o in self._passed if self.holds_own(o)]

    def _refuse_not_elementwise(self, optimizer: Optimizer) -> None:
        names = [c.__name__ for c in type(optimizer).__mro__]
        others = () if isinstance(optimizer, HostOptimizer) else names  # ours know of shards
        reason = next((_NOT_ELEMENTWISE[n] for n in others if n in _NOT_ELEMENTWISE), "")
        if _NOT_FUSED & set(names) and any(group.get("fused") for group in optimizer.param_groups):
            reason = "torch has no fused kernel of it for DTensors; fused=False has the others"
        if reason and any(isinstance(p, DTensor) for p in self._own(optimizer)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot update parameters that are split over ranks: {reason}",
                "zerograph.optim.Muon brings each to one rank" if "Muon" in names else _ELEMENTWISE,
            )

    def _refuse_local_gradients(self, optimizer: Optimizer, foreign: int) -> None:
        """Where gradients are averaged for one optimizer, or one parameter, they are for all of the backend."""
        name, why = type(optimizer).__name__, self._why_reduced()
        if why:
            raise UnsupportedError(
                f"{name} averages momenta in place of gradients, which is not possible {why}",
                "stage=0 or stage=1 on a mesh of one axis, with nothing offloaded; or AdamW, with reduce_wire= where "
                "links are slow",
            )
        others = self._accumulation.left_out(set(map(id, params_in(optimizer.param_groups))))
        if others or foreign:
            what = f"{len(others)} trainable parameters of the backend are in no group of it, the first {others[:1]}"
            what = what if others else f"{foreign} parameters with gradients are not of this backend"
            raise UnsupportedError(
                f"{name} averages momenta in place of the gradients of all parameters of one backend, and {what}",
                f"give all parameters of the model to one {name}, in groups, or freeze those that are not trained: "
                "requires_grad_(False)",
            )

    def _warn_of_unaveraged(self, optimizer: Optimizer) -> None:
        """Asked for all that are outside of the backend, not for those with gradients: these may differ by rank."""
        device = next((local_tensor(p).device for p in self._own(optimizer)), None)
        outside = [p for p in params_in(optimizer.param_groups) if id(p) not in self._params and p.requires_grad]
        plain = [p for p in outside if not isinstance(p, DTensor)]
        if device is not None:
            warn_of_unaveraged_gradients(plain, self._communicator(), type(optimizer).__name__, device)

    def _refuse_replaced(self, optimizer: Optimizer) -> None:
        old = sum(p in self._replaced for p in params_in(optimizer.param_groups))
        if old:
            raise UnsupportedError(
                f"{type(optimizer).__name__} holds {old} parameters that the model no longer has: its first call put "
                "sharded ones in their places, and found no list of the old ones to correct",
                "make the optimizer from model.parameters() itself, or call zerograph.shard(model, backend) first",
            )

    def _refuse_skipped(self, optimizer: Optimizer, foreign: Collection[int]) -> None:
        """Dynamo skips modules of torch.nn itself, and functions it cannot break, without a word."""
        if not foreign:
            return  # the search for skipped models looks at every object of the process
        held = sum(id(p) in foreign for p in self._skipped())
        if held:
            raise UnsupportedError(
                f"{type(optimizer).__name__} steps on {held} parameters of a model that was given to this backend and "
                "never sharded: Dynamo compiled nothing of it, and ranks would drift apart",
                "call zerograph.shard(model, backend) first: what Dynamo skips (RNNs, graph breaks in loops) then runs "
                "eagerly; of a module of torch.nn itself (nn.Sequential), module.compile() compiles nothing at all: "
                "use torch.compile(model, backend=...)",
            )


_CHECKS: weakref.WeakKeyDictionary[OptimizerCheck, None] = weakref.WeakKeyDictionary()
"""Those of all living backends, in the order in which these were made."""


def _living() -> list[OptimizerCheck]:
    # ``keyrefs`` makes the list at once, whatever other threads do.
    return [check for ref in _CHECKS.keyrefs() if (check := ref()) is not None]


@functools.cache
def _watch_steps() -> None:
    """Once for the process: a hook that went with its backend would go while torch goes through its hooks, where that
    is collected in a step."""

    def before(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        _, *given = args  # torch gives hooks the optimizer itself, too
        closure = kwargs.get("closure", given[0] if given else None)
        if isinstance(closure, nn.Module) or not callable(closure):  # what others' steps take is no closure
            closure = None
        for check in _living():
            check.begins(optimizer, has_closure=closure is not None)
        if closure is None:
            return args, kwargs
        watched = _beginning_behind(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *given[1:]), kwargs

    def after(optimizer: Optimizer, *_: Any) -> None:
        _STEPPING.discard(optimizer)
        for check in _living():
            check.ended(optimizer)

    def failed(optimizer: Optimizer, error: BaseException) -> None:
        if optimizer in _STEPPING:
            _explain(optimizer, error)
        _STEPPING.discard(optimizer)
        for check in _living():
            check.failed(optimizer, error)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    register_failed_step_hook(failed)


def _explain(optimizer: Optimizer, error: BaseException) -> None:
    """Add a hint to torch's words about an operation that it cannot do on rows, or on rows beside plain tensors."""
    innermost = collections.deque(traceback.walk_tb(error.__traceback__), maxlen=1)
    of_dtensors = any(f.f_globals.get("__name__", "").startswith("torch.distributed.tensor") for f, _ in innermost)
    if (of_dtensors or "DTensor" in str(error)) and not isinstance(error, ZeroGraphError):
        name = type(optimizer).__name__
        error.add_note(f"\nhint: {name} does more than torch can do with parameters split over ranks: {_ELEMENTWISE}")


def _beginning_behind(optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    """``closure``, which is the user's code and may read numbers of rows, to log them; a step begins behind it."""

    @functools.wraps(closure, updated=())
    def watched(*args: Any, **kwargs: Any) -> Any:
        _STEPPING.discard(optimizer)
        result = closure(*args, **kwargs)
        for check in _living():
            check.begins(optimizer)
        return result

    return watched


def _refuse_own_number(op: Any, args: tuple[DTensor], _: dict[str, Any]) -> Any:
    """``tensor.item()``, which reads this rank's part: step sizes, and then the model, would differ between ranks.

    Asking whether any of one's rows is not a number is no such thing.
    """
    tensor = args[0]
    split = math.prod(tensor.device_mesh.size(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())
    optimizer = next(iter(_STEPPING), None)
    if optimizer is not None and split > 1 and tensor.dtype != torch.bool:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() reads a number of this rank's rows alone (.item() of a DTensor, as of "
            "a dot product or a norm), and would step by another size on every rank",
            f"{_ELEMENTWISE}; Prodigy and D-Adaptation add up over ranks with fsdp_in_use=True",
        )
    return op(local_tensor(tensor))
