"""Optimizers that average something else than gradients: these then stay on each rank, as ``no_sync`` holds them.

A backward begins before its optimizer steps, and in a process that loads a checkpoint before it has ever stepped. So
optimizers are asked, by the parameters that they have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from zerograph.core.errors import UnsupportedError

_ALL: weakref.WeakSet[LocalGradients] = weakref.WeakSet()
"""Those of all optimizers: a backward knows its parameters alone."""

HINT = "clip gradients in steps before freeze_step only, where they are averaged"


class LocalGradients:
    """The wish of one optimizer, which keeps it alive, for gradients that are not averaged."""

    def __init__(self, name: str, params: Callable[[], Iterable[Tensor]]) -> None:
        """``name`` is the optimizer's, for people; ``params`` are those that it wants such gradients of now, a method
        of the optimizer, which it does not keep alive."""
        self.name, self._params = name, weakref.WeakMethod(params)
        _ALL.add(self)

    @property
    def ids(self) -> set[int]:
        """Its parameters by ``id``."""
        params = self._params()
        return set(map(id, params())) if params is not None else set()


def taker(params: Iterable[Tensor]) -> LocalGradients | None:
    """Who wants each rank's own gradients of some of ``params``."""
    wanted = [(each, ids) for each in list(_ALL) if (ids := each.ids)]
    if not wanted:
        return None  # as in most processes, in every step
    own = set(map(id, params))
    return next((each for each, ids in wanted if not own.isdisjoint(ids)), None)


def refuse_reading(params: Iterable[Tensor]) -> None:
    """Raises:
    UnsupportedError: the gradients of ``params`` are about to be read as averages, and are a rank's own.
    """
    found = taker(params)
    if found is not None:
        raise UnsupportedError(
            f"{found.name} averages momenta and not gradients by now: each rank has its own, and ranks would clip them "
            "by different norms",
            HINT,
        )
