"""The private names of torch that watching the steps of optimizers needs, where it offers no hook.

Other rooms have a file of this name too; nothing else touches private names. Each entry says what it is for, why
nothing public does, and where it was seen: 2.11 in torch's sources, 2.13 by the tests of this file,
which pass on 2.14 too.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

FailedStep = Callable[[Optimizer, BaseException], None]

_HOOKS: OrderedDict[int, FailedStep] = OrderedDict()
_hooked_by_torch = Optimizer.profile_hook_step


def register_failed_step_hook(hook: FailedStep) -> RemovableHandle:
    """Call ``hook`` with any optimizer whose step raises, and the error, before anybody can catch that.

    torch calls hooks before a step and after one that returned. They are put around ``step`` when the first optimizer
    of a class is made; from the first call of this function on, these are put around them. A learning rate scheduler
    keeps the ``step`` that its optimizer had when the scheduler was made: one made before stays unseen.
    Seen in 2.11, 2.13.
    """
    _watch_all_classes()
    handle = RemovableHandle(_HOOKS)
    _HOOKS[handle.id] = hook
    return handle


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with all hooks of a step around it, for a method that is one under another name. Seen in 2.11, 2.13."""
    return _watched(_hooked_by_torch(step))


def _watched(hooked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hooked)
    def watched(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        try:
            return hooked(optimizer, *args, **options)
        except BaseException as error:
            tell_failed_step(optimizer, error)
            raise

    return watched


def tell_failed_step(optimizer: Optimizer, error: BaseException) -> None:
    """Call the hooks, for a step that goes on after its method has returned."""
    for hook in tuple(_HOOKS.values()):
        hook(optimizer, error)


@functools.cache
def _watch_all_classes() -> None:
    """Once for the process, as torch does: its hooks belong to classes, too."""
    Optimizer.profile_hook_step = staticmethod(hooked_step)  # type: ignore[assignment, method-assign]
    for kind in set(_subclasses(Optimizer)):  # a class with two bases is found from both
        if getattr(vars(kind).get("step"), "hooked", False):
            kind.step = _watched(kind.step)  # type: ignore[method-assign]


def _subclasses(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
