"""Inside of a forward or outside: whether the code that reads a parameter sees the sharded one or the full tensor.

The modules of an adopted model count the forwards that run, per thread. Inside of one, reading ``self.weight`` yields
the full tensor; outside it yields the parameter itself, as under ``fully_shard``. Compiled code counts nothing: there
every reading is recorded as a marker.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.compiler import is_compiling

from zerograph.graph.torch_private import skip_frame
from zerograph.sharding.torch_private import cleanups_of_call, in_backward


class _Forwards(threading.local):
    """How many forwards run in this thread. As a context it counts one more."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


FORWARDS = _Forwards()


def inside() -> bool:
    """Whether code of a forward runs in this thread."""
    # torch.utils.checkpoint runs a part of a forward again in the backward, where nothing counts it. It does so with
    # gradients enabled; hooks, which also run in a backward and are outside, run with them disabled.
    return FORWARDS.depth > 0 or (torch.is_grad_enabled() and in_backward())


def _count(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with FORWARDS:
        return function(*args, **kwargs)


class _Own(NamedTuple):
    """Stands in for a class, of a function that one module alone has as its forward."""

    forward: Callable[..., Any]


def counting(owner: type[nn.Module] | _Own) -> Callable[..., Any]:
    """``owner.forward``, looked up when it is called, as a function that counts while it runs."""
    known = owner.forward
    if hasattr(known, "_zg_counts"):
        return known

    # Without the function's attributes: Dynamo goes by some of them, and they are true of that function alone.
    @functools.wraps(known, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return owner.forward(*args, **kwargs) if is_compiling() else _count(owner.forward, *args, **kwargs)

    counted: Any = forward
    if (known.__module__ or "").partition(".")[0] == "torch":
        # torch.compile knows modules of torch.nn by this file: given one, it compiles a frame of its own around it.
        counted.__code__ = counted.__code__.replace(co_filename=known.__code__.co_filename)
    counted._zg_counts = True
    # Dynamo inlines it. After a graph break it runs uncompiled and counts, and the forward below it is compiled.
    skip_frame(counted)
    return counted  # type: ignore[no-any-return]


skip_frame(_count)


def count_own_forward(module: nn.Module) -> None:
    """Count calls of a forward that ``module`` alone has: one assigned to it, or that of an fx graph's own class."""
    own = module.__dict__.get("forward")
    if isinstance(module, fx.GraphModule):
        cls: Any = type(module)
        cls.forward = counting(_Own(cls.forward))
    elif isinstance(own, MethodType) and own.__self__ is module:  # a copy of the module then has one of itself
        module.__dict__["forward"] = MethodType(counting(_Own(own.__func__)), module)
    elif own is not None:
        module.__dict__["forward"] = counting(_Own(own))


def count_running_call(modules: Container[nn.Module]) -> None:
    """Count the forward of one of ``modules`` that is being compiled, if there is one, until the compiled call ends.

    A model that is adopted by its first call runs that forward already, and nothing has counted it. Where Dynamo skips
    the forward, as it does for a graph break in a loop, the rest of the call runs uncompiled and reads weights.
    """
    cleanups = cleanups_of_call(modules)
    if cleanups is not None:
        cleanups.append(FORWARDS.__exit__)
        FORWARDS.__enter__()
