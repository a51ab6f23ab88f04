"""Adoption: the first call of a compiled model turns its plain parameters into sharded ones.

Before Dynamo traces the first frame for a backend, the module that is called is the one to shard. Where there is none
(a compiled function), or it does not own all, Dynamo hands over a graph whose inputs are plain parameters: their
modules are found, and Dynamo traces the frame again. Parameters are sharded in place; optimizers and lists that hold
the old objects are pointed at the new ones.
This file holds every touch of Dynamo's private interfaces that this needs.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Guard, TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerograph.core.errors import UnsupportedError, ZeroGraphError


class Retrace(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):  # type: ignore[misc]
    """Asks Dynamo to trace the frame again.

    The first base clears Dynamo's speculation log, the second is let through by ``call_user_compiler``.
    """


def before_first_trace(adopt: Callable[[Any], None]) -> None:
    """Have ``adopt`` called with what torch.compile was given, whenever Dynamo is about to trace a frame for it.

    Idempotent; ``torch._dynamo.reset()`` forgets it.
    """
    callbacks = torch._dynamo.callback_handler.start_callbacks
    if any(getattr(callback, "adopt", None) is adopt for callback in callbacks):
        return

    def starts(args: Any) -> None:
        frame = sys._getframe(1) if args.callback_trigger.name == "DYNAMO" else None
        while frame is not None and "compiler_fn" not in frame.f_locals:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            adopt(_innermost(frame.f_locals["compiler_fn"]))

    starts.adopt = adopt  # type: ignore[attr-defined]
    callbacks.append(starts)


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise our errors in a form that Dynamo hands to the user as it is, instead of inside a BackendCompilerFailed."""
    try:
        yield
    except ZeroGraphError as error:
        base = type(error)
        members = {"__module__": base.__module__, "__init__": Exception.__init__}
        clear = type(base.__name__, (base, ShortenTraceback), members)
        result = clear(*error.args)
        result.hint, result.first_useful_frame = error.hint, None
        raise result from error.__cause__


def traced_function() -> str:
    """The user's function that Dynamo is tracing, as ``name (file:line)``."""
    code = InstructionTranslator.current_tx().f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def match_rows_alone() -> None:
    """Let Dynamo's guards on the rows of sharded parameters not ask whether two of them are one tensor.

    Rows of different parameters never are. Where inputs are, Dynamo says so when it compiles again, and looks all that
    it asked about up by the names it has in the traced model, in a model of the same class that is still plain.
    Call it while a backend runs: guards are built afterwards.
    """
    for guard in TracingContext.get().guards_context.dynamo_guards:
        source = guard.originating_source
        if isinstance(source, AttrSource) and source.member == "_local_tensor":
            guard.create_fn = functools.partial(_match_alone, guard.create_fn)


def _match_alone(match: Callable[..., None], builder: GuardBuilder, guard: Guard) -> None:
    names, managers = builder.no_tensor_aliasing_names, builder.no_tensor_aliasing_guard_managers
    before = len(names)
    match(builder, guard)
    del names[before:], managers[before:]


def refuse_wrapped(modules: Iterable[nn.Module]) -> None:
    """Refuse models that something else already distributes.

    Raises:
        UnsupportedError: naming the wrapper.
    """
    for module in modules:
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            raise UnsupportedError(
                f"the model is wrapped by {type(module).__name__}, which synchronizes gradients itself",
                "give torch.compile the plain model; ZeroGraph does what the wrapper did (stage=0 is DDP)",
            )


def parameters(gm: fx.GraphModule) -> list[nn.Parameter]:
    """The parameters among the graph's inputs."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        arg = node.meta.get("grapharg")  # Dynamo's link from a graph input to the object it came from
        example = getattr(arg, "example", None) if arg is not None else None
        if isinstance(example, nn.Parameter):
            found.append(example)
    return found


def roots_of_call(gm: fx.GraphModule) -> list[nn.Module]:
    """The outermost modules of the call being compiled: those on the stack, and those that own the inputs."""
    roots = [m for m in (*modules_on_stack(), *_source_modules(gm)) if not isinstance(m, fx.GraphModule)]
    return list(dict.fromkeys(roots))


def modules_on_stack() -> Iterator[nn.Module]:
    """The ``self`` of every module call between the user's call of the compiled model and here."""
    frame = sys._getframe(1)
    inside = True
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(owner, nn.Module):
            yield getattr(owner, "_orig_mod", owner)
        elif not inside:
            return  # one module call beyond the wrapper: that of model.compile()
        if not inside and isinstance(owner, nn.Module):
            return
        if frame.f_code.co_name == "compile_wrapper":
            inside = False
        frame = frame.f_back  # type: ignore[assignment]


def called_module() -> nn.Module | None:
    """The module whose call is being compiled, when it is a module's call and not that of a function or method."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back  # type: ignore[assignment]
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code not in _MODULE_CALLS:
        return None
    owner = caller.f_locals["self"]
    return getattr(owner, "_orig_mod", owner)  # type: ignore[no-any-return]


_MODULE_CALLS = {function.__code__ for function in (nn.Module._wrapped_call_impl, nn.Module._call_impl)}


def _source_modules(gm: fx.GraphModule) -> Iterator[nn.Module]:
    """For each parameter, the outermost module on the path by which the frame reached it."""
    tx = InstructionTranslator.current_tx()  # the only way to the frame's own variables
    scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
    for node in gm.graph.find_nodes(op="placeholder"):
        arg = node.meta.get("grapharg")
        source = getattr(arg, "source", None)
        owner = None
        while source is not None:
            value = _evaluate(source, scope)
            owner = value if isinstance(value, nn.Module) else owner
            source = getattr(source, "base", None)
        if owner is not None:
            yield getattr(owner, "_orig_mod", owner)


def _evaluate(source: Any, scope: Mapping[str, Any]) -> Any:
    name = source.name() if callable(source.name) else source.name  # a method before torch 2.12
    try:
        return eval(name, dict(scope))
    except (NameError, AttributeError, KeyError, IndexError, TypeError, SyntaxError):
        return None  # closures and synthetic sources have no expression; the owners' scan finds those modules


def live(*bases: type) -> list[Any]:
    """Every live instance of ``bases`` or their subclasses. A process has millions of objects: looking a type up in a
    set costs a tenth of asking each object whether it is an instance."""
    types: set[type] = set()
    new: set[type] = set(bases)
    while new:
        types |= new
        subclasses: set[type] = set().union(*(type.__subclasses__(cls) for cls in new))
        new = subclasses - types
    return [obj for obj in gc.get_objects() if type(obj) in types]


def modules_holding(params: Iterable[Tensor], objects: Iterable[Any]) -> list[nn.Module]:
    """The modules among ``objects`` that own one of ``params`` (tied weights may live outside the compiled model)."""
    wanted = {id(p) for p in params}
    return [
        obj
        for obj in objects
        if isinstance(obj, nn.Module) and any(id(p) in wanted for p in obj.__dict__.get("_parameters", {}).values())
    ]


def modules_given_to(backend: object) -> list[nn.Module]:
    """Every live module that torch.compile or module.compile() gave to ``backend``, called or not."""
    return [owner for owner, context in _compiled_modules() if _backend_of(context) is backend]


def _compiled_modules() -> Iterator[tuple[nn.Module, Any]]:
    for obj in live(nn.Module):
        if isinstance(obj, OptimizedModule):
            yield obj._orig_mod, obj.dynamo_ctx
        elif obj.__dict__.get("_compiled_call_impl") is not None:
            yield obj, inspect.getclosurevars(obj._compiled_call_impl).nonlocals.get("self")


def _backend_of(context: Any) -> Any:
    """What the user gave torch.compile, behind the wrappers that Dynamo put around it."""
    callback = getattr(context, "callback", None)
    return _innermost(callback) if callback is not None else None


def _innermost(compiler: Any) -> Any:
    wrapped = innermost_backend(compiler)
    return getattr(wrapped, "compiler_fn", wrapped)


def replace_everywhere(pairs: Mapping[int, tuple[Tensor, Tensor]], convert_state: Any, objects: Iterable[Any]) -> None:
    """Point optimizers, and lists of parameters, that hold an old parameter at its new one.

    Args:
        pairs: old and new parameter by ``id(old)``.
        convert_state: function of (state tensor of an old parameter, new parameter) that shards optimizer state.
        objects: what to look for optimizers in.
    """
    for holder in [held for held in gc.get_objects() if type(held) is list]:
        if not pairs.keys().isdisjoint(map(id, holder)) and all(isinstance(p, Tensor) for p in holder):
            holder[:] = [pairs[id(p)][1] if id(p) in pairs else p for p in holder]
    for optimizer in [o for o in objects if isinstance(o, Optimizer)]:
        _point_optimizer(optimizer, pairs, convert_state)


def _point_optimizer(optimizer: Optimizer, pairs: Mapping[int, tuple[Tensor, Tensor]], convert_state: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [pairs[id(p)][1] if id(p) in pairs else p for p in group["params"]]
    for key in [k for k in optimizer.state if id(k) in pairs]:
        new = pairs[id(key)][1]
        state = optimizer.state.pop(key)
        optimizer.state[new] = {n: v if n in _COUNTERS else convert_state(v, new) for n, v in state.items()}


# State of torch.optim that is 0-d for every parameter, so that its shape says nothing about a 0-d parameter.
_COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})


def one_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh equal to ``mesh`` that was seen, by process group.

    DTensor's caches take equal meshes for the same, AOTAutograd tells them apart by identity: a graph that holds both
    cannot be lowered. Copies and pickles of a DTensor bring a mesh of their own.
    """
    name = mesh.get_group().group_name
    first = _MESHES.setdefault(name, mesh)
    if first.get_group() is not mesh.get_group():  # of a group that was destroyed; names are used again
        first = _MESHES[name] = mesh
    return first if first == mesh else mesh


_MESHES: weakref.WeakValueDictionary[str, DeviceMesh] = weakref.WeakValueDictionary()


def move_to_one_mesh(param: Tensor | None) -> None:
    """Let ``param`` lie on :func:`one_mesh` of its own mesh; the only way in is private."""
    if isinstance(param, DTensor):
        param._spec = dataclasses.replace(param._spec, mesh=one_mesh(param.device_mesh))


def skip_getters(cls: type) -> None:
    """Keep Dynamo from compiling the generated properties as frames of their own, at graph breaks."""
    for member in vars(cls).values():
        if isinstance(member, property) and member.fget is not None:
            skip_frame(member.fget)


def skip_frame(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling ``function`` as a frame of its own; it is still inlined into other frames."""
    torch._dynamo.eval_frame.skip_code(function.__code__)
