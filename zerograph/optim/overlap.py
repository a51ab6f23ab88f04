"""Updates inside of backwards, of one optimizer: begun where gradients are reduced, and ended by its step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.optim.factor import Factor
from zerograph.optim.owner import Owner, StepsOf
from zerograph.optim.parts import UpdateRow
from zerograph.optim.torch_private import tell_failed_step
from zerograph.optim.update import PendingUpdate
from zerograph.runtime.comm.entry import reason_of
from zerograph.runtime.executor import early
from zerograph.runtime.executor.early import Arrival, Updater
from zerograph.runtime.executor.residency import moving_groups
from zerograph.runtime.offload.fetches import FetchedRun
from zerograph.runtime.torch_private import local_tensor


class EarlySteps(StepsOf, Updater):
    """Those of a native optimizer."""

    def __init__(self, optimizer: Owner) -> None:
        from zerograph.sharding.foreign_code import explain_clipping  # imports Dynamo, and that Triton

        StepsOf.__init__(self, optimizer)
        Updater.__init__(self)
        self._under_way: list[PendingUpdate] = []
        self._begun = self._begun_before = 0  # in this iteration, and in the last one
        self._groups: dict[int, int] = {}  # by ``id`` of a parameter, in the backward that runs
        self._values: list[dict[str, Any]] = []  # of the groups, then
        explain_clipping()

    @property
    def is_current(self) -> bool:
        """Whether the optimizer is there, and these are its updates: a checkpoint that is loaded brings others."""
        found = self._optimizer()
        return found is not None and found.early is self

    @torch.no_grad()
    def start(
        self, grads: Sequence[tuple[Tensor, Tensor]], arrival: Arrival | None, kept: Sequence[FetchedRun]
    ) -> None:
        """Begin to update parameters by gradients of this rank's parts of them, while the backward goes on.

        Args:
            grads: the parameters, each with its whole gradient.
            arrival: waits for what of ``grads`` is on its way to where it is updated.
            kept: of the parameters, what the backward has read from NVMe.

        Raises:
            UnsupportedError: a parameter or gradient that cannot be updated; none of ``grads`` has been then.
            StorageError: there is no room for states, or an earlier update failed.
        """
        opt = self.optimizer
        if not self.updated:
            self._groups = {id(p): i for i, group in enumerate(opt.param_groups) for p in group["params"]}
            self._values = list(map(_values_of, opt.param_groups))
        while self._under_way and self._under_way[0].done():
            self.wait(len(self._under_way) - 1)
        by_group: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for param, grad in grads:
            by_group.setdefault(self._groups[id(param)], []).append((param, grad))
        rows = []
        for index, pairs in by_group.items():
            params, group = [param for param, _ in pairs], opt.param_groups[index]
            key = (index, *map(id, params))
            layout = opt.layout(key, group, params)
            rows.append(UpdateRow(key, group, layout, layout.gradients_of([grad for _, grad in pairs])))
        pending = opt.update(rows, Factor(), arrival, kept)
        # It has begun: whatever fails from here on, these are updated.
        self._under_way.append(pending)
        self.updated.update(id(param) for param, _ in grads)
        self._begun += 1
        if opt.store is not None:
            more = self._begun < self._begun_before
            pending.stream_beside(functools.partial(opt.store.in_background, more=more))
        # Whatever autograd has saved of them is not what it was.
        torch.autograd.graph.increment_version([local_tensor(param) for param, _ in grads])

    def wait(self, most: int) -> None:
        """Return when no more than ``most`` updates are under way.

        Raises:
            StorageError: a transfer failed, and a part of the states on NVMe is updated.
        """
        while len(self._under_way) > most:
            self._under_way[0].wait()
            self._under_way.pop(0)

    def backward_ended(self) -> None:
        """The backward has run to its end: wait for its updates, before the user looks at parameters or changes them.

        Raises:
            StorageError: a transfer failed, and a part of the states on NVMe is updated.
        """
        self.backward = None
        try:
            self.settle()
        except BaseException as error:
            tell_failed_step(self.optimizer, error)  # type: ignore[arg-type]
            raise

    def settle(self) -> None:
        """Return when none is under way; after an error nothing goes on before a checkpoint is loaded."""
        try:
            self.wait(0)
        except BaseException as error:
            self.abandon(reason_of(error))
            raise

    def abandon(self, why: str) -> None:
        for pending in self._under_way:
            with contextlib.suppress(Exception):  # the first error is on its way to the caller
                pending.wait()
        self._under_way, self.backward = [], None
        if self.optimizer.store is not None:
            self.optimizer.store.slots.take()  # after Ctrl-C nothing waits for what streams
        if self.updated:
            self.optimizer.leave_half_done(why)
        self.stepped()

    def end(self, given: Sequence[str]) -> set[int]:
        """A step begins; returns what is updated already.

        Args:
            given: what it was given that needs all gradients before the first update.

        Raises:
            ConfigError: it was given some such thing, no backend knows its parameters, or groups have changed.
            ZeroGraphError: there was no backward, or another gradient than that by which a parameter was updated.
        """
        for what in given:
            self.refuse(what)
        if self.backward is not None:
            self.abandon("a backward failed after it had updated parameters")
            if self.optimizer.store is not None:
                self.optimizer.store.refuse_half_done()
        if self.updated and list(map(_values_of, self.optimizer.param_groups)) != self._values:
            raise ConfigError(
                f"a group of {self} was changed between backward and step: with overlap=True the backward has updated "
                "parameters by what it was before",
                "let schedulers step after the optimizer: backward(), optimizer.step(), scheduler.step()",
            )
        second = [p for p in self.params if p.grad is not None and id(p) in self.updated]
        if second:
            self.abandon("a gradient came from outside of the compiled model")
            raise ZeroGraphError(
                f"{len(second)} parameters got a gradient from outside of the compiled model, after {self} had updated "
                f"them in the same backward, the first of shape {list(second[0].shape)}",
                "compute with them inside of the model only, or give them to an optimizer without overlap; then load a "
                "checkpoint",
            )
        if moving_groups(self.optimizer.param_groups) and not self.updated and all(p.grad is None for p in self.params):
            self._refuse_idle()
        return self.updated

    def _refuse_idle(self) -> NoReturn:
        if self.optimizer.store is None:
            raise ConfigError(
                f"{self}(overlap=True): no backend of zerograph has sharded its parameters, so that no backward "
                "updates them",
                "compile the model with zerograph.backend(...), on one process with offload=, or leave overlap out",
            )
        raise ZeroGraphError(
            f"{self}.step() without a backward since the last one", "call step() once after each backward"
        )

    def refuse(self, what: str) -> NoReturn:
        """Raises:
        ConfigError: always.
        """
        raise ConfigError(
            f"{what} with overlap=True: backwards update parameters, before all gradients are known",
            f"leave {what} out, or make {self} without overlap",
        )

    def stepped(self) -> None:
        """The step has begun to update the rest: what comes now is of the next one."""
        self.updated, self.iteration = set(), object()
        self._begun, self._begun_before = 0, self._begun


def overlapping() -> list[EarlySteps]:
    """Those of all living optimizers."""
    return [each for each in early.living() if isinstance(each, EarlySteps)]


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group for its updates, as numbers that stay."""
    own = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in own.items()}
