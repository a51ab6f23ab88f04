"""Inside of a forward or outside: whether the code that reads a parameter sees the sharded one or the full tensor.

The modules of an adopted model keep a list of the forwards that run, per thread. Inside of one, reading ``self.weight``
yields the full tensor; outside it yields the parameter itself, as under ``fully_shard``. Compiled code keeps none:
there every reading is recorded as a marker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.compiler import is_compiling

from zerograph.graph.torch_private import skip_frame
from zerograph.sharding.torch_private import compiles_calls, goes_into_graphs, in_backward, running_call
from zerograph.sharding.unsharded import FORWARDS, EagerForward, begin, close, end


def inside() -> bool:
    """Whether code of a forward runs in this thread."""
    # torch.utils.checkpoint runs a part of a forward again in the backward, where nothing counts it. It does so with
    # gradients enabled; hooks, which also run in a backward and are outside, run with them disabled.
    return bool(FORWARDS.running) or (torch.is_grad_enabled() and in_backward())


skip_frame(inside)


def _count(owner: type[nn.Module] | _Own, *args: Any, **kwargs: Any) -> Any:
    function = owner.forward
    call = EagerForward(args[0] if args and isinstance(args[0], nn.Module) else None, function, compiles_calls())
    try:
        begin(call)
        return end((args, kwargs), function(*args, **kwargs))
    finally:
        close(call)


skip_frame(_count)


class _Own(NamedTuple):
    """Stands in for a class, of a function that one module alone has as its forward."""

    forward: Callable[..., Any]


def counting(owner: type[nn.Module] | _Own) -> Callable[..., Any]:
    """``owner.forward``, looked up when it is called, as a function that counts while it runs."""
    known = owner.forward
    if hasattr(known, "_zg_counts"):
        return known
    if isinstance(owner, type) and goes_into_graphs(owner):
        owner = _Own(known)  # Dynamo reads no attribute of such a class: each call of `owner.forward` broke the graph

    # Without the function's attributes: Dynamo goes by some of them, and they are true of that function alone.
    @functools.wraps(known, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return owner.forward(*args, **kwargs) if is_compiling() else _count(owner, *args, **kwargs)

    counted: Any = forward
    if (known.__module__ or "").partition(".")[0] == "torch":
        # torch.compile knows modules of torch.nn by this file: given one, it compiles a frame of its own around it.
        counted.__code__ = counted.__code__.replace(co_filename=known.__code__.co_filename)
    counted._zg_counts = True
    # Dynamo inlines it. After a graph break it runs uncompiled and counts, and the forward below it is compiled.
    skip_frame(counted)
    return counted  # type: ignore[no-any-return]


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
    found = running_call(modules)
    if found is not None:
        module, cleanups = found
        forward = module.forward
        call = EagerForward(module, getattr(forward, "__wrapped__", forward), compiles=True)
        FORWARDS.running.append(call)
        cleanups.append(lambda *_: close(call))
