"""Updates inside of backwards: an optimizer may take a gradient as it is reduced, and update its parameter while the
backward goes on.

An update may begin when no later instruction of the backward reads the parameter, and when no other gradient of it can
come before the optimizer's step. One can where the parameter was read by several forwards (a model that is called
twice, a weight that is tied over a graph break): autograd then has its gradients, and the step updates it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import Node

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.plan import Param, ParamTile
from zerograph.runtime.delayed import is_read_eagerly
from zerograph.runtime.executor.accumulation import are_marks
from zerograph.runtime.offload.fetches import FetchedRun
from zerograph.runtime.torch_private import (
    Open,
    Untouched,
    accumulated_directly,
    after_backward,
    gradient_goes,
    has_gradient_hooks,
)

Arrival = Callable[[], None]
"""Waits until gradients are where they are updated."""


class Updater(Protocol):
    """The updates of an optimizer inside of backwards; ``str`` of them is its name.

    Attributes:
        updated: parameters, by ``id``, that it has updated since its last step.
        iteration: another object from step to step.
        backward: the one that updates now, which is dead if it has failed; None once it has ended.
        is_current: whether the optimizer is there, and has not got another one of these.
    """

    updated: set[int]
    iteration: object
    backward: Open | None

    def __init__(self) -> None:
        self.updated, self.iteration, self.backward = set(), object(), None
        _ALL.add(self)

    @property
    def is_current(self) -> bool: ...

    @property
    def params(self) -> list[Tensor]:
        """All that it has."""

    def backward_ended(self) -> None:
        """It has, without an error: wait for what it has begun, before the user looks at parameters."""

    def start(
        self, grads: Sequence[tuple[Tensor, Tensor]], arrival: Arrival | None, kept: Sequence[FetchedRun]
    ) -> None:
        """Begin to update parameters by these gradients of this rank's parts of them; of the parameters those ``kept``
        need not be read again."""

    def wait(self, most: int) -> None:
        """Return when no more than ``most`` such updates are under way."""

    def abandon(self, why: str) -> None:
        """A backward failed: what it has updated cannot be taken back, so that nothing goes on before a checkpoint is
        loaded. Nothing is under way any more then."""


_ALL: weakref.WeakSet[Updater] = weakref.WeakSet()
"""Of all backends: an optimizer is made before any of them knows it, and each looks for its own."""


def living() -> list[Updater]:
    """Those of all optimizers that live."""
    return [updater for updater in _ALL if updater.is_current]


def refuse_reading(params: Iterable[Tensor]) -> None:
    """Raises:
    ConfigError: the gradients of ``params`` are about to be read, and a backward has used some of them up.
    """
    updated = [updater for updater in living() if updater.updated]
    known = {id(param) for param in params} if updated else set()
    for updater in updated:
        if not known.isdisjoint(updater.updated):
            raise ConfigError(
                f"norms or clipping of gradients by which {updater}(overlap=True) has updated parameters in the "
                "backward: they are gone",
                f"leave that out (max_grad_norm=0 of a Trainer), or make {updater} without overlap",
            )


class EarlyUpdates:
    """The parameters of one backend that are updated inside of backwards, over all its frames."""

    def __init__(self, params: Mapping[str, Tensor], find: Callable[[], Iterable[Updater]]) -> None:
        """``params`` are the outward parameters by name, now and later; ``find`` gives the optimizers of some of them
        that update inside of backwards."""
        self._params, self._find = params, find
        self._owners: dict[int, Updater] = {}  # by ``id`` of the parameter, when the last program began
        # By parameter, with the iteration of its owner in which that was so:
        self._read: dict[str, tuple[object, int]] = {}  # forwards that read it and whose backward has not run
        self._left: dict[str, object] = {}  # autograd has a gradient of it
        self._taken: dict[int, tuple[list[tuple[str, Tensor]], list[Arrival]]] = {}  # by bucket
        self._kept: dict[int, tuple[Sequence[FetchedRun], Untouched]] = {}  # by bucket
        self._in_backward = False

    def enter(self, kind: str, names: Iterable[str]) -> None:
        """A program begins that reads and reduces the parameters ``names``.

        Raises:
            ZeroGraphError: one of them is updated already, and its optimizer has not stepped since.
            ConfigError: one of them belongs to two optimizers that update inside of backwards.
        """
        self._owners = self._found()
        for each in dict.fromkeys(self._owners.values()):
            if each.backward is not None and each.backward() is None:
                each.abandon("a backward failed after it had updated parameters")
        for name in names if self._owners else ():
            key = id(self._params.get(name))
            owner = self._owners.get(key)
            if owner is not None and key in owner.updated:
                raise ZeroGraphError(
                    f"a {kind} reads {name}, which the last backward has updated, before {owner}.step()",
                    "with overlap=True call step() after each backward; add up micro-batches inside of "
                    "backend.no_sync(), or make the optimizer without overlap",
                )
        self._in_backward = kind == "backward"

    def _found(self) -> dict[int, Updater]:
        owners, twice = self._owned()
        if twice is not None:
            gc.collect()  # optimizers are in reference cycles
            owners, twice = self._owned()
        if twice is not None:
            raise ConfigError(
                f"a parameter of shape {list(twice.shape)} belongs to two optimizers with overlap=True",
                "give each parameter to one optimizer",
            )
        return owners

    def _owned(self) -> tuple[dict[int, Updater], Tensor | None]:
        """By ``id`` of a parameter its owner, and one parameter that has two."""
        owners: dict[int, Updater] = {}
        for owner in self._find():
            for param in owner.params:
                if owners.setdefault(id(param), owner) is not owner:
                    return owners, param
        return owners, None

    def leave(self, kind: str, names: Iterable[str]) -> None:
        """The program has run."""
        change = {"forward": 1, "backward": -1}.get(kind, 0)
        for name in names if self._owners and change else ():
            owner = self._owners.get(id(self._params.get(name)))
            if owner is not None:
                self._read[name] = owner.iteration, max(0, self._reads(name, owner) + change)
        self._ends()

    def _ends(self) -> None:
        self._in_backward = False
        self._kept.clear()
        self._owners = {}  # optimizers may go

    def _reads(self, name: str, owner: Updater) -> int:
        iteration, reads = self._read.get(name, (None, 0))
        return reads if iteration is owner.iteration else 0

    def take(
        self,
        bucket: int,
        params: Sequence[Param],
        grads: Sequence[Tensor | None],
        arrival: Arrival | None = None,
    ) -> list[Tensor | None]:
        """Keep those reduced ``grads`` of a bucket that are whole gradients of their parameters; returns what autograd
        gets in their places: None for these. Until ``arrival()`` they are not where they are updated."""
        if not self._owners:
            return list(grads)
        direct, summed = accumulated_directly(), list[tuple[str, Tensor]]()
        left: list[Tensor | None] = []
        alone = are_marks([self._params[described.name].grad for described in params])
        for described, grad, is_alone in zip(params, grads, alone, strict=True):
            takes = grad is not None and self._takes(described.name, direct, is_alone)
            left.append(None if takes else grad)
            if takes and grad is not None:
                summed.append((described.name, grad))
        if summed:
            taken, arrivals = self._taken.setdefault(bucket, ([], []))
            taken += summed
            arrivals += [arrival] if arrival is not None else []
        return left

    def _takes(self, name: str, direct: Mapping[int, Node], is_alone: bool) -> bool:
        """``is_alone``: autograd would add to nothing."""
        param = self._params[name]
        owner = self._owners.get(id(param))
        if owner is None or gradient_goes(param, direct) != "added":
            return False
        if (
            self._reads(name, owner) == 1
            and self._left.get(name) is not owner.iteration
            and id(param) in direct
            and not has_gradient_hooks(param)
            and not is_read_eagerly(param)  # which adds a gradient of its own
            and is_alone
        ):
            return True
        self._left[name] = owner.iteration
        return False

    def keep(self, bucket: int, params: Iterable[Param | ParamTile], runs: Sequence[FetchedRun]) -> None:
        """Keep what was fetched of ``bucket`` for its update, where an optimizer updates it inside of the backward; it
        is used where nobody has written to the parameters since."""
        found = [self._params[p.name] for p in params]
        if any(id(param) in self._owners for param in found):
            self._kept[bucket] = runs, Untouched(found)

    def start(self, bucket: int) -> None:
        """Nothing reads the parameters of ``bucket`` any more in this backward: begin to update them."""
        taken, arrivals = self._taken.pop(bucket, ((), []))
        kept, seen = self._kept.pop(bucket, ((), None))
        by_owner: dict[Updater, list[tuple[Tensor, Tensor]]] = {}
        for name, grad in taken:
            param = self._params[name]
            by_owner.setdefault(self._owners[id(param)], []).append((param, grad))
        for owner, grads in by_owner.items():
            if owner.backward is None:
                owner.backward = after_backward(owner.backward_ended)
            # Of two owners the second finds on NVMe what the first has written beside its own.
            as_read = seen is not None and not seen.changed and len(by_owner) == 1
            owner.start(grads, _all(arrivals) if arrivals else None, kept if as_read else ())
            for param, _ in grads:
                param.grad = None  # the mark of what no_sync held back

    def wait(self, most: int) -> None:
        """Return when no optimizer has more than ``most`` updates under way: their gradients take memory."""
        for owner in dict.fromkeys(self._owners.values()):
            owner.wait(most)

    def abandon(self, why: str) -> None:
        """The program that began last failed."""
        self._taken.clear()
        for owner in dict.fromkeys(self._owners.values()) if self._in_backward else ():
            owner.abandon(why)
        self._ends()


def _all(arrivals: Sequence[Arrival]) -> Arrival:
    def arrive() -> None:
        for each in arrivals:
            each()

    return arrive
