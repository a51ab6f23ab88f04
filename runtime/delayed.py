"""Updates that run on the host while programs compute with the values before them: ZeRO-Offload's delay by one step.

Whoever has to see the values behind an update settles it first: programs for inference, checkpoints, other optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class DelayedUpdate(Protocol):
    """The last update of one optimizer.

    Attributes:
        changing: the parameters that it updates.
    """

    changing: list[Tensor]

    def settle(self) -> None:
        """Return when it has ended, and programs see its values."""


_UNDER_WAY: list[DelayedUpdate] = []
# Of all backends: modules and optimizers know none. It keeps updates alive, so that none is lost with its optimizer.

_READ_EAGERLY = WeakIdKeyDictionary()


def began(update: DelayedUpdate) -> None:
    """Know that ``update`` is under way."""
    _UNDER_WAY.append(update)


def ended(update: DelayedUpdate) -> None:
    """Forget ``update``."""
    _UNDER_WAY.remove(update)


def settle(params: Iterable[Tensor]) -> None:
    """Settle every update of one of ``params``.

    Raises:
        Exception: what an update failed with. Nothing goes on then before a checkpoint is loaded.
    """
    if _UNDER_WAY:
        own = set(map(id, params))
        for update in [u for u in _UNDER_WAY if not own.isdisjoint(map(id, u.changing))]:
            update.settle()


def read_eagerly(param: Tensor) -> None:
    """Code that is not compiled reads ``param`` itself in a forward: from now on no update runs beside that."""
    if param not in _READ_EAGERLY:
        settle([param])
        _READ_EAGERLY[param] = None


def is_read_eagerly(param: Tensor) -> bool:
    """Whether :func:`read_eagerly` has heard of ``param``."""
    return param in _READ_EAGERLY
