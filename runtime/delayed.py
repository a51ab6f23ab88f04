"""Updates that go on behind their step: while programs compute with the values before them, which is ZeRO-Offload's
delay by one step, or until programs gather what they change.

Whoever has to see the values behind an update settles it first: programs for inference, checkpoints, other optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class DelayedUpdate(Protocol):
    """The last update of one optimizer.

    Attributes:
        changing: the parameters that it updates; empty when it has ended.
    """

    changing: list[Tensor]

    def settle(self) -> None:
        """Return when it has ended, and programs see its values."""

    def wait_for(self, gathers: Iterable[int]) -> bool:
        """Return when it has ended for what ``gathers`` bring, and whether nobody has waited for that before; they are
        numbers that :meth:`~zerograph.runtime.offload.fetches.Fetches.gathers` gives."""


_LIVING: weakref.WeakSet[DelayedUpdate] = weakref.WeakSet()
# Of all backends: modules and optimizers, which settle updates, know none.

_READ_EAGERLY = WeakIdKeyDictionary()


def follow(update: DelayedUpdate) -> None:
    """Know ``update``, as long as it lives."""
    _LIVING.add(update)


def settle(params: Iterable[Tensor]) -> None:
    """Settle every update of one of ``params``.

    Raises:
        Exception: what an update failed with. Nothing goes on then before a checkpoint is loaded.
    """
    under_way = [update for update in _LIVING if update.changing]
    own = set(map(id, params)) if under_way else set()
    for update in under_way:
        if not own.isdisjoint(map(id, update.changing)):
            update.settle()


def read_eagerly(param: Tensor) -> None:
    """Code that is not compiled reads ``param`` itself in a forward: from now on no update runs beside that."""
    if param not in _READ_EAGERLY:
        settle([param])
        _READ_EAGERLY[param] = None


def is_read_eagerly(param: Tensor) -> bool:
    """Whether :func:`read_eagerly` has heard of ``param``."""
    return param in _READ_EAGERLY
