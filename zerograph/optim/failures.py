"""Who is told when a native optimizer's step fails: torch has hooks before and after a step, and none for that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

FailedStep = Callable[[Optimizer, BaseException], None]
_HOOKS: OrderedDict[int, FailedStep] = OrderedDict()


def register_failed_step_hook(hook: FailedStep) -> RemovableHandle:
    """Call ``hook`` with an optimizer whose step raises, and the error, before anybody can catch that."""
    handle = RemovableHandle(_HOOKS)
    _HOOKS[handle.id] = hook
    return handle


def tell_failed_step(optimizer: Optimizer, error: BaseException) -> None:
    """``optimizer`` is about to raise ``error`` out of a step."""
    for hook in tuple(_HOOKS.values()):
        hook(optimizer, error)
