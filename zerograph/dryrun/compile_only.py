"""Compile a model without running it or holding it, for any number of simulated ranks.

The model is built on the meta device, sharded there, and traced with fake tensors that claim to be on the CPU: kernels
are chosen by device, and the meta device has few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from zerograph.compiler.unfold import Joint, NotFoldable, Repeat, signature, unfold
from zerograph.core.errors import UnsupportedError, ZeroGraphError
from zerograph.dryrun.layer_loops import told_apart
from zerograph.dryrun.untraceable import ModelRaises, explained
from zerograph.graph.repeated_layers import Stack, repeated_layers
from zerograph.symbolic import SymbolicStep
from zerograph.vary import Vary

if TYPE_CHECKING:
    from zerograph.api import Backend
    from zerograph.frame import Frame

log = logging.getLogger(__name__)


class DryRun(BaseException):
    """Raised where a program would begin to run. Not an ``Exception``: the model may catch those."""


class Captured(BaseException):
    """Raised where a step has been captured that nothing else is wanted of; not an ``Exception`` for the same reason.

    Attributes:
        step: that step.
        states: bytes on the device between steps, per rank.
    """

    def __init__(self, step: SymbolicStep, states: int) -> None:
        super().__init__()
        self.step, self.states = step, states


@dataclass(frozen=True, slots=True)
class Compiled:
    """The frames of one call of the model, and the tokens (or samples) that it was given."""

    frames: tuple[Frame, ...]
    tokens: int


def compile_only(
    make: Callable[[], Any],
    *,
    world_size: int,
    batch: int = 1,
    seq: int = 1024,
    vary: Vary | None = None,
    fold: bool = True,
    moments: int = 2,
    **options: Any,
) -> Compiled:
    """Compile forward and backward of what ``make`` returns, as rank 0 of ``world_size`` would.

    Args:
        make: returns a model, or a model and its inputs: a tuple, or a dict of keyword arguments. Called under
            ``torch.device("meta")``, so that nothing of any size is allocated.
        batch, seq: shape of the token ids that a model without inputs gets.
        vary: other sizes of the inputs, those that the model brings too. If they are left open, the step is captured
            and no more.
        fold: trace a few of many layers that are alike, and repeat them; else, and where they turn out to differ, all.
        moments: tensors that the optimizer keeps per parameter, for a plan that is searched.
        options: arguments of :func:`zerograph.backend`.

    Raises:
        UnsupportedError: the model needs values (data-dependent control flow), or breaks into several graphs.
        ConfigError: the model's own code raises.
        RuntimeError: a process group exists already: this process trains.
        Captured: the step was captured, where sizes are left open.
    """
    from zerograph.api import backend, shard  # they import this module

    if dist.is_initialized():
        raise RuntimeError("a dry run simulates its ranks and cannot share a process with a process group")
    with simulated_rank(0, world_size):
        model, given = on_meta(make)
        stack = _foldable(model) if fold and (vary is None or vary.open is None) else None
        ours = backend(**{"compute": "eager", **options})
        ours.runs, ours.folds = False, fold
        ours.planner.moments = moments
        ours.planner.whole = tuple(model.parameters())  # a graph of a few layers reads a few of them
        shard(model, ours, device="cpu")
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        args, kwargs = _fake_arguments(given, batch, seq, mode, vary)
        if vary is not None:
            ours.open_sizes = vary.open_sizes

        def uncompiled() -> None:
            again, brought = on_meta(make)
            _fake(again, mode)
            positional, named = _fake_arguments(brought, batch, seq, mode, vary)
            with mode:
                again(*positional, **named)

        call = _Call(model, ours, mode, args, kwargs, uncompiled)
        if stack is None or not _folded(call, stack):
            call.trace()
        return Compiled(tuple(ours.frames), _tokens([*args, *kwargs.values()]))


def _fake_arguments(
    given: Any, batch: int, seq: int, mode: FakeTensorMode, vary: Vary | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, positional and by keyword, their tensors fake."""
    args, kwargs = _arguments(given, batch, seq)
    inputs = [*args, *kwargs.values()]
    if vary is not None:
        inputs = vary.resized(inputs)
    fakes: dict[int, Tensor] = {}
    inputs = [_input(x, mode, fakes, vary) for x in inputs]
    return tuple(inputs[: len(args)]), dict(zip(kwargs, inputs[len(args) :], strict=True))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a model, to be compiled and not run; ``uncompiled`` makes the same call of the model as it was."""

    model: nn.Module
    backend: Backend
    mode: FakeTensorMode
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uncompiled: Callable[[], object]

    def trace(self, unfolding: Callable[[Joint], Repeat] | None = None) -> None:
        """Fill the backend's frames, with those of this call alone."""
        torch._dynamo.reset()
        self.backend.frames.clear()
        self.backend.unfolding = unfolding
        self.backend.replace(_fake(self.model, self.mode))
        try:
            with self.mode:
                torch.compile(self.model, backend=self.backend, fullgraph=True)(*self.args, **self.kwargs)
        except DryRun:
            return
        except (ZeroGraphError, torch._dynamo.exc.BackendCompilerFailed):
            raise
        except Exception as error:
            told = explained(error, self.uncompiled)
            if told is None:
                raise
            raise told from told.__cause__
        raise UnsupportedError("the model computes nothing that could be compiled", "give one with a forward")


class _Unfolder:
    """What to do with the joint graphs of a few of a stack's layers; a graph that does not repeat ends the dry run."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.short: Joint | None = None
        self.whole = False
        self.reason = "it has no backward"

    def keep(self, joint: Joint) -> Repeat:
        """Of the fewest layers, to be compared."""
        self.short, self.reason = joint, ""
        raise DryRun

    def unfold(self, joint: Joint) -> Repeat:
        """Of one more: the graph of all layers."""
        assert self.short is not None
        path, (fewer, more) = self.stack.path, self.stack.probes()
        try:
            if signature(unfold(self.short, path, fewer, more)) != signature(unfold(joint, path, more, more)):
                raise NotFoldable("one layer more is not the same work once more")
            repeat = Repeat.of(joint, path, more, range(len(self.stack.layers)), labels=range(len(more)))
        except NotFoldable as error:
            self.reason = str(error)
            raise DryRun from error
        self.whole = True
        return repeat


def _folded(call: _Call, stack: Stack) -> bool:
    """Compile ``call`` from traces of a few layers; False, and a word of why, where that cannot be done."""
    unfolder = _Unfolder(stack)
    for chosen, unfolding in zip(stack.probes(), (unfolder.keep, unfolder.unfold), strict=True):
        try:
            with stack.only(chosen):
                call.trace(unfolding)
        except Exception as error:
            if unfolder.whole or isinstance(error, ModelRaises):
                raise  # all layers would have met it
            unfolder.reason = f"with {len(chosen)} layers it fails: {str(error).strip().partition(chr(10))[0]}"
        if unfolder.reason:
            _warn(stack, unfolder.reason)
            return False
    return True


def _foldable(model: nn.Module) -> Stack | None:
    """The layers of ``model`` of which a few may speak for all."""
    stack = repeated_layers(model)
    reason = told_apart(model, stack) if stack is not None else ""
    if stack is not None and reason:
        _warn(stack, reason)
        return None
    return stack


def _warn(stack: Stack, reason: str) -> None:
    log.warning("tracing all %d layers of %s: %s", len(stack.layers), stack.path, reason)


def _fake(model: nn.Module, mode: FakeTensorMode) -> dict[int, nn.Parameter]:
    """Put fake parameters and buffers in the places of those on the meta device; returns the parameters by old id."""
    new: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = new.setdefault(id(old), _faked(old, mode))  # type: ignore[assignment]
    return {key: value for key, value in new.items() if isinstance(value, nn.Parameter)}


def _input(value: Any, mode: FakeTensorMode, fakes: dict[int, Tensor], vary: Vary | None) -> Any:
    """An argument of the call; a tensor that is given twice (ids that are labels too) stays one tensor."""
    if not isinstance(value, Tensor):
        return value
    if id(value) not in fakes:
        fakes[id(value)] = _faked(value, mode)
        if vary is not None:
            vary.mark(value, fakes[id(value)])
    return fakes[id(value)]


def _faked(old: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor like ``old`` that is fake, and on the CPU."""
    local = old.to_local() if isinstance(old, DTensor) else old
    with mode, torch.no_grad():
        new = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
        if isinstance(old, DTensor):
            new = DTensor.from_local(
                new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def on_meta(make: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """What ``make`` returns, called under ``torch.device("meta")``: a model, and its inputs or None.

    Raises:
        UnsupportedError: it returned something else.
    """
    with torch.device("meta"):
        found = make()
    match found:
        case nn.Module():
            return found, None
        case (nn.Module() as model, inputs):
            return model, inputs
    kind = (
        f"tuple of {', '.join(type(x).__name__ for x in found)}" if isinstance(found, tuple) else type(found).__name__
    )
    if isinstance(found, type):
        kind = f"the class {found.__name__}, not an instance of it"
    raise UnsupportedError(f"the model's function returned {kind}", "return an nn.Module, or (module, inputs)")


def _arguments(inputs: Any, batch: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as positional and keyword arguments; token ids where there are none."""
    match inputs:
        case None:
            return (torch.empty(batch, seq, dtype=torch.int64, device="meta"),), {}
        case Mapping():
            return (), dict(inputs)
        case tuple() | list():
            return tuple(inputs), {}
    return (inputs,), {}


def _tokens(inputs: Iterable[Any]) -> int:
    first = next((x for x in inputs if isinstance(x, Tensor)), None)
    if first is None:
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[0]


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """A default process group of ``world_size`` ranks in this one process, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
