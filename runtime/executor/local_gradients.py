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

    def wants(self, param: Tensor) -> bool:
        """Whether ``param`` is one of them."""
        params = self._params()
        return params is not None and any(own is param for own in params())


def taker(params: Iterable[Tensor]) -> LocalGradients | None:
    """Who wants each rank's own gradients of the trainable ones of ``params``, those of a backend: an optimizer has all
    of these, or none. Asked for each gradient of a backward, so that one parameter has to tell."""
    first = next((param for param in params if param.requires_grad), None) if _ALL else None
    return next((each for each in list(_ALL) if each.wants(first)), None) if first is not None else None


def refuse_reading(params: Iterable[Tensor]) -> None:
    """Raises:
    UnsupportedError: the gradients of ``params`` are about to be read as averages, and are a rank's own.
    """
    found = next((one for param in params if (one := taker([param])) is not None), None)
    if found is not None:
        raise UnsupportedError(
            f"{found.name} averages momenta and not gradients by now: each rank has its own, and ranks would clip them "
            "by different norms",
            HINT,
        )
