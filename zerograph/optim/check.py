"""Refuse optimizers that would compute something else on shards than on whole parameters."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerograph.errors import UnsupportedError

log = logging.getLogger(__name__)

_NOT_ELEMENTWISE = {
    "LBFGS": "it works on the dot products of whole gradients",
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "it factors rows and columns of whole matrices",
    "Rprop": "it writes through index masks, which DTensor cannot",
    "SparseAdam": "it needs sparse gradients",
}


class OptimizerCheck:
    """Looks at every optimizer once, before its first step on parameters of one backend."""

    def __init__(self, params: Container[int], compiled: Callable[[], bool]) -> None:
        self._params, self._compiled = params, compiled
        self._warned = False
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        check = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            live = check()
            if live is not None:
                live.look_at(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def look_at(self, optimizer: Optimizer) -> None:
        """Raises:
        UnsupportedError: ``optimizer`` holds sharded parameters of this backend and is not elementwise.
        """
        if all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # DCP steps once without moving anything, to make the state
        self._warn_when_idle()
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        names = [c.__name__ for c in type(optimizer).__mro__]
        reason = next((_NOT_ELEMENTWISE[n] for n in names if n in _NOT_ELEMENTWISE), "")
        params = (p for group in optimizer.param_groups for p in group["params"])
        if reason and any(isinstance(p, DTensor) and id(p) in self._params for p in params):
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot update parameters that are split over ranks: {reason}",
                "use an elementwise optimizer (AdamW, Adam, SGD, Adagrad, Lion, ...), or stage=0",
            )

    def _warn_when_idle(self) -> None:
        """Dynamo skips modules of torch.nn itself without a word, and ranks would drift apart."""
        if self._warned or self._compiled() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._warned = True
        log.warning(
            "an optimizer steps, but this ZeroGraph backend has compiled nothing: ranks are not synchronized by it. "
            "If the model is a module of torch.nn itself (nn.Sequential), module.compile() does nothing: "
            "use torch.compile(model, backend=...)"
        )
