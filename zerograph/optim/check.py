"""Refuse optimizers that would compute something else on shards than on whole parameters, or on too few of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerograph.core.errors import UnsupportedError
from zerograph.lent import refuse_lost_edits
from zerograph.runtime.hold import GradientHold

_NOT_ELEMENTWISE = {
    "LBFGS": "it works on the dot products of whole gradients",
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "it factors rows and columns of whole matrices",
    "Rprop": "it writes through index masks, which DTensor cannot",
    "SparseAdam": "it needs sparse gradients",
}
_NOT_FUSED = {"SGD", "Adagrad"}


class OptimizerCheck:
    """Looks at every optimizer before its first step, and again when its backend has sharded more since, or more of
    what it has not sharded has gradients."""

    def __init__(
        self,
        params: Collection[int],
        replaced: Container[Tensor],
        skipped: Callable[[], Iterable[Tensor]],
        hold: GradientHold,
    ) -> None:
        """``params`` are the ids of the backend's own, ``replaced`` what was in their places before, ``skipped`` finds
        those that should be its own and are not.
        """
        self._params, self._replaced, self._skipped, self._hold = params, replaced, skipped, hold
        self._passed: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        check = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            live = check()
            if live is not None:
                live.look_at(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def look_at(self, optimizer: Optimizer) -> None:
        """Raises:
        UnsupportedError: ``optimizer`` holds sharded parameters of this backend and is not elementwise, or
            parameters that should be sharded and are not.
        ZeroGraphError: a part of the gradients is held back, or an edit of a full copy was lost.
        """
        if all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # DCP steps once without moving anything, to make the state
        refuse_lost_edits()
        if self._hold.names and any(id(p) in self._params for p in _params_of(optimizer)):
            self._hold.refuse_step()
        foreign = {id(p) for p in _params_of(optimizer) if id(p) not in self._params and p.grad is not None}
        looked_at = len(self._params), len(foreign)
        if self._passed.get(optimizer) == looked_at:
            return
        self._refuse_replaced(optimizer)
        self._refuse_skipped(optimizer, foreign)
        self._refuse_not_elementwise(optimizer)
        self._passed[optimizer] = looked_at

    def stepped(self) -> list[Optimizer]:
        """The optimizers that have stepped on parameters of the backend."""
        return [o for o in self._passed if any(id(p) in self._params for p in _params_of(o))]

    def _refuse_not_elementwise(self, optimizer: Optimizer) -> None:
        names = [c.__name__ for c in type(optimizer).__mro__]
        reason = next((_NOT_ELEMENTWISE[n] for n in names if n in _NOT_ELEMENTWISE), "")
        if _NOT_FUSED & set(names) and any(group.get("fused") for group in optimizer.param_groups):
            reason = "torch has no fused kernel of it for DTensors; fused=False has the others"
        if reason and any(isinstance(p, DTensor) and id(p) in self._params for p in _params_of(optimizer)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot update parameters that are split over ranks: {reason}",
                "use an elementwise optimizer (AdamW, Adam, SGD, Adagrad, Lion, ...), or stage=0",
            )

    def _refuse_replaced(self, optimizer: Optimizer) -> None:
        old = sum(p in self._replaced for p in _params_of(optimizer))
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


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
