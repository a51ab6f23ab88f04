"""The private names of Dynamo and DTensor that adopting a model needs, where no public name exists."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import callback, trace_rules
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.source import AttrSource, ClosureSource, DictGetItemSource, GetItemSource, GlobalSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import ExactWeakKeyDictionary as ExactWeakKeyDictionary
from torch._dynamo.utils import get_compilation_metrics
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd as AOTDispatchAutograd
from torch._guards import Guard, TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._dispatch import found_inf_reduce_handler
from torch.utils import _pytree

from zerograph.core.errors import StorageError, ZeroGraphError
from zerograph.graph.torch_private import skip_frame

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult

# Compiled models


class Retrace(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):  # type: ignore[misc]
    """Asks Dynamo to trace the frame again; a backend has no other way to.

    The first base clears Dynamo's speculation log, the second is let through by ``call_user_compiler``.
    Seen in 2.11, 2.13.
    """


@contextmanager
def errors_reach_users() -> Iterator[None]:
    """Raise our errors in a form that Dynamo hands to the user as it is, instead of inside a BackendCompilerFailed. It
    does so for this class of its own only. Seen in 2.11, 2.13."""
    try:
        yield
    except ZeroGraphError as error:
        base = type(error)
        members = {"__module__": base.__module__, "__init__": Exception.__init__}
        clear = type(base.__name__, (base, ShortenTraceback), members)
        result = clear(*error.args)
        result.hint, result.first_useful_frame = error.hint, None
        if isinstance(error, StorageError):
            result.errno, result.filename = error.errno, error.filename
        raise result from error.__cause__


def before_traces(starts: Callable[[], None]) -> None:
    """Have ``starts`` called whenever Dynamo is about to trace a frame; ``torch.compiler.reset()`` forgets it.

    Dynamo's own registration, undocumented. Idempotent. Seen in 2.11, 2.13.
    """
    registered = callback.callback_handler.start_callbacks
    if all(getattr(known, "starts", None) is not starts for known in registered):
        _call(starts)


def _call(starts: Callable[[], None]) -> None:
    def started(args: callback.CallbackArgs) -> None:
        if args.callback_trigger is callback.CallbackTrigger.DYNAMO:
            starts()

    started.starts = starts  # type: ignore[attr-defined]
    callback.on_compile_start(started)


def original(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given, where ``model`` is what it returned. Seen in 2.11, 2.13."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model  # type: ignore[no-any-return]


def goes_into_graphs(cls: type[nn.Module]) -> bool:
    """Whether Dynamo takes ``cls`` for a function that it writes into its graphs, as ``allow_in_graph`` tells it, with
    which diffusers decorates classes. What is allowed is kept in a private set. Seen in 2.11, 2.13."""
    return trace_rules.is_callable_allowed(cls)  # type: ignore[no-any-return]


def backend_given(module: nn.Module) -> Any:
    """The backend that torch.compile was given for ``module``; None where it was not given this module.

    It puts the backend behind wrappers of its own, and ``module.compile()`` all of them into a closure.
    Seen in 2.11, 2.13.
    """
    context = None
    wrapper: Any = module.__dict__.get("_compiled_call_impl") or module.__dict__.get("forward")
    if isinstance(module, OptimizedModule):
        context = module.dynamo_ctx
    elif hasattr(wrapper, "_torchdynamo_orig_callable"):
        context = inspect.getclosurevars(wrapper).nonlocals.get("self")
    compiler = getattr(context, "callback", None)
    wrapped = innermost_backend(compiler) if callable(compiler) else None
    return getattr(wrapped, "compiler_fn", wrapped)


def compile_any_call(module: nn.Module, backend: Any) -> None:
    """``module.compile(backend=backend)`` that works for classes of ``torch.nn`` too, which torch leaves uncompiled.

    It is put where ``module.compile()`` puts its own, which copies and pickles leave behind. An attribute such as
    ``forward`` would go with a copy, and compute with the parameters of the original. Seen in 2.11, 2.13.
    """

    def call(*args: Any, **options: Any) -> Any:
        return module._call_impl(*args, **options)

    module._compiled_call_impl = torch.compile(call, backend=backend)


def running_modules() -> Iterator[nn.Module]:
    """The modules that are being called, the innermost first.

    Dynamo tells neither callbacks nor backends whose call it compiles, and ``nn.Module`` has no list of its calls, so
    they are looked for on the stack. Seen in 2.11, 2.13.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _MODULE_CALLS:
            yield frame.f_locals[frame.f_code.co_varnames[0]]
        frame = frame.f_back


def called_model() -> tuple[nn.Module, Any] | None:
    """The innermost module that is being called and that torch.compile was given, and its backend.

    This is for every loop that calls ``model(x)``: the model is sharded before it is traced, in place of tracing it
    twice, and a layer that Dynamo compiles by itself, after a graph break, is not taken for the model.
    """
    for module in running_modules():
        backend = backend_given(module)
        if backend is not None:
            return original(module), backend
    return None


# No set: code that Dynamo makes may have a slice among its constants, and then no hash in Python 3.11.
_MODULE_CALLS = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)


def running_call(modules: Container[nn.Module]) -> tuple[nn.Module, list[Callable[..., object]]] | None:
    """Which of ``modules`` is called by the compiled call that is being compiled, and what torch.compile calls when
    that call ends, whatever happens in it; None where none of them is. It has no hook there. Seen in 2.11, 2.13."""
    frame, module = sys._getframe(1), None
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        module = _called(frame, modules) or module
        frame = frame.f_back  # type: ignore[assignment]
    module = module or (_called(frame.f_back, modules) if frame is not None else None)
    return (module, frame.f_locals["cleanups"]) if frame is not None and module is not None else None


def _called(frame: FrameType | None, modules: Container[nn.Module]) -> nn.Module | None:
    if frame is None or frame.f_code not in _MODULE_CALLS:
        return None
    module = original(frame.f_locals["self"])
    return module if module in modules else None


def compiles_calls() -> bool:
    """Whether Dynamo compiles what is called in this thread now. Seen in 2.11, 2.13."""
    return bool(get_eval_frame_callback())


skip_frame(compiles_calls)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a forward returned, as torch and transformers say how to take it apart; torch has had that
    for years under a private name. Seen in 2.11, 2.13."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with what ``function`` makes of its tensors in their places. Seen in 2.11, 2.13."""
    return _pytree.tree_map_only(Tensor, function, value)


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code of ``function``; of what it wraps, where it is a decorator's."""
    return getattr(inspect.unwrap(function), "__code__", None)


def running_codes() -> dict[int, CodeType]:
    """The user's code that runs in this thread as it was written, by ``id``, each with the part of it that runs: behind
    a graph break Dynamo goes on with a part as a function of its own. Code that it has compiled runs as other code.
    Seen in 2.13."""
    frame, codes = sys._getframe(1), dict[int, CodeType]()
    while frame is not None:
        codes.setdefault(id(_original_code(frame.f_code)), frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    return codes


def parts_of(code: CodeType) -> list[CodeType]:
    """``code`` and those of its parts that Dynamo has made functions of. Seen in 2.13."""
    made = ContinueExecutionCache.cache
    return [code, *(made[code].values() if code in made else ())]


def _original_code(code: CodeType) -> CodeType:
    made = ContinueExecutionCache.generated_code_metadata
    return made[code].code if code in made else code  # type: ignore[no-any-return]


def line_of_break(code: CodeType) -> tuple[str, int] | None:
    """File and line at which Dynamo gave up to compile ``code``, which may be in what that calls; None where it has
    compiled it, or has not tried lately. Public is only a text for people. Seen in 2.11, 2.13."""
    own = (code.co_filename, code.co_firstlineno, code.co_name)
    tried = [m for m in get_compilation_metrics() if (m.co_filename, m.co_firstlineno, m.co_name) == own]
    if not tried or tried[-1].fail_user_frame_filename is None or tried[-1].fail_user_frame_lineno is None:
        return None
    return tried[-1].fail_user_frame_filename, tried[-1].fail_user_frame_lineno


def in_backward() -> bool:
    """Whether autograd computes gradients in this thread; ``torch.autograd`` does not say."""
    return torch._C._current_graph_task_id() != -1


# The frame that is being compiled


def modules_read_through(gm: fx.GraphModule) -> list[nn.Module]:
    """For each input of a graph of Dynamo's, the outermost module on the path by which the frame reached it.

    A graph names its inputs by text only; what Dynamo knows of their sources has no public account. Sources are
    followed down from the frame's variables; where one is of an unknown kind (a generated object), there is no module.
    Call it while a backend runs. Seen in 2.11, 2.13.
    """
    output = InstructionTranslator.current_tx().output
    scopes: dict[type, Any] = {LocalSource: output.local_scope, GlobalSource: output.global_scope}
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        module = _outermost_module(getattr(node.meta.get("grapharg"), "source", None), scopes)
        if module is not None:
            found.append(original(module))
    return found


def _outermost_module(source: Any, scopes: Mapping[type, Any]) -> nn.Module | None:
    path = []
    while source is not None:
        path.append(source)
        source = getattr(source, "base", None)
    value: Any = None
    for step in reversed(path):
        try:
            value = _follow(step, value, scopes)
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
        if isinstance(value, nn.Module):
            return value
    return None


def _follow(step: Any, value: Any, scopes: Mapping[type, Any]) -> Any:
    """The value of a source, where the source that it builds on has ``value``."""
    match step:
        case LocalSource():
            return scopes[LocalSource][step.local_name]
        case GlobalSource():
            return scopes[GlobalSource][step.global_name]
        case AttrSource():
            return getattr(value, step.member)
        case ClosureSource():
            return value.__closure__
        case GetItemSource() | DictGetItemSource():
            return value[step.index]
    return None


def ignore_shard_aliasing() -> None:
    """Let Dynamo's guards on the rows of sharded parameters not ask whether two of them are one tensor.

    Rows of different parameters never are. Where inputs are, Dynamo says so when it compiles again, and looks all that
    it asked about up by the names it has in the traced model, in a model of the same class that is still plain. No
    setting leaves out single guards. Call it while a backend runs: guards are built afterwards. Seen in 2.11, 2.13.
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


# Parameters


def place_on(param: DTensor, mesh: DeviceMesh) -> None:
    """Let ``param`` lie on ``mesh``, which equals its own; a DTensor's mesh cannot be set. Seen in 2.11, 2.13."""
    param._spec = dataclasses.replace(param._spec, mesh=mesh)


def set_shard(param: DTensor, values: DTensor) -> None:
    """Let ``param`` hold this rank's rows of ``values`` and be placed as they are, and stay the same object.

    ``torch.utils.swap_tensors`` refuses tensors that Dynamo's guards refer to. Seen in 2.11, 2.13.
    """
    param._local_tensor, param._spec = values._local_tensor, values._spec  # type: ignore[attr-defined]


def share_hooks(old: Tensor, new: Tensor) -> None:
    """Let ``new`` have the very dicts of hooks of ``old``, which the handles that the user holds refer to. Tensors show
    only ``register_hook``. Seen in 2.11, 2.13."""
    new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks is not None:  # type: ignore[attr-defined]
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]


# Other code


def before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Have ``check`` called with the arguments of every call of ``owner.name``, before it runs; idempotent.

    For other code that has no hook and takes shards for plain tensors: wrappers when they are made, safetensors, of
    which all that it writes passes ``_find_shared_tensors``, and ``clip_grad_norm_``, which users import by name and
    which ends in ``_clip_grads_with_norm_``; and AOTAutograd where a gradient of its outputs is of another class.
    Seen in 2.11, 2.13, and in safetensors 0.8.
    """
    function: Any = getattr(owner, name, None)
    if function is None or hasattr(function, "_zg_checked"):
        return

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    checked._zg_checked = True  # type: ignore[attr-defined]
    setattr(owner, name, checked)


def files_written(writer: FileSystemWriter, results: Sequence[Sequence[WriteResult]]) -> list[Path]:
    """The files that ranks have written of a checkpoint, by their results; none where they are no files of a host.

    A writer's file system and a result's file have no public names. Seen in 2.11, 2.13.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem  # late: checkpoints take 0.1 s to import

    if not isinstance(writer.fs, FileSystem):
        return []
    names = dict.fromkeys(result.storage_data.relative_path for own in results for result in own)
    return [Path(writer.path) / name for name in names]


def metadata_file(writer: FileSystemWriter) -> Path | None:
    """The file by which a checkpoint is found; None where it is no file of a host.

    Names as in :func:`files_written`. Without collectives each rank has one of its own. Seen in 2.11, 2.13.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem

    if not isinstance(writer.fs, FileSystem):
        return None
    return Path(writer._get_metadata_path(None if writer.use_collectives else writer.rank))


forget_meshes = debug._clear_sharding_prop_cache
"""Empty DTensor's caches of how operators shard, which give results the first of equal meshes. A mesh knows the rank
that it was made on. Seen in 2.11, 2.13."""


def handle_op(op: Any, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Have DTensor call ``handler`` for ``op``, with it and its arguments; idempotent.

    The table of handlers is one per process and not public. Seen in 2.11, 2.13.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[op] = handler


unscale = found_inf_reduce_handler
"""DTensor's own handler of the operator that GradScaler calls, for :func:`handle_op`. Seen in 2.11, 2.13."""
