"""Modules whose forward Dynamo does not compile, at stages 0 to 2: ranks may read what they like of them.

A loop over experts that leaves out those without tokens breaks the graph in a loop: Dynamo skips such code, and each
rank reads the weights of other experts. At these stages a step has parameters unsharded on every rank, so nothing need
be gathered where it is read. All ranks call the module, and when it is called its parameters are gathered, all that it
and its children own. Inside of its forward these are plain full tensors, in code that Dynamo compiles there too. Their
gradients are reduced together when the backward ends (:mod:`~zerograph.runtime.executor.late_gradients`).

Which module that is, is known once something in it is read or called that would not be if its code were compiled: the
outermost forward that runs uncompiled then. A rank that reads nothing of it takes part when the forward ends.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.core.plan import Param
from zerograph.core.units import format_bytes
from zerograph.graph.torch_private import skip_frame
from zerograph.runtime import delayed
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.spec import ShardSpec
from zerograph.sharding.torch_private import (
    ExactWeakKeyDictionary,
    code_of,
    in_backward,
    line_of_break,
    map_tensors,
    parts_of,
    running_codes,
    tensors_of,
)

log = logging.getLogger(__name__)


class EagerForward:
    """A forward that Python runs.

    Attributes:
        module: whose forward it is, if that is known.
        function: the user's code.
        compiles: whether Dynamo compiles what it calls.
        opened: the parameters of the module, if it has unsharded these.
    """

    __slots__ = ("compiles", "function", "module", "opened")

    def __init__(self, module: nn.Module | None, function: Callable[..., Any], compiles: bool) -> None:
        self.module, self.function, self.compiles = module, function, compiles
        self.opened: Unsharded | None = None


skip_frame(EagerForward.__init__)


class _Forwards(threading.local):
    """The forwards that Python runs in this thread, outermost first. As a context it is inside of one more."""

    def __init__(self) -> None:
        self.running: list[EagerForward] = []

    def __enter__(self) -> None:
        self.running.append(EagerForward(None, self.__enter__, compiles=False))

    def __exit__(self, *_: object) -> None:
        self.running.pop()


FORWARDS = _Forwards()


class Unsharded:
    """The parameters of a module and its children, which are unsharded while it is open.

    Attributes:
        parts: the module and its children, as they were when it was last opened.
        is_shown: whether it is open: in its forward, and while a backward may compute parts of that again.
    """

    def __init__(self, reads: UncompiledReads) -> None:
        self.reads = reads
        self.parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.is_shown = False
        self._owners: list[weakref.ref[nn.Module]] = []
        self._full: dict[int, Tensor] = {}  # by ``id`` of the outward parameter
        self._described: list[Param] = []
        self.bytes = 0

    def find(self, module: nn.Module) -> bool:
        """Look for the parameters in ``module``, which may have got more since, as adapters; returns whether there are
        any of the backend: copies of a model have their own."""
        self.parts = weakref.WeakSet(module.modules())
        self._owners = [weakref.ref(part) for part in module.modules() if part.__dict__.get("_zg_specs")]
        return any(True for _ in self._places())

    def open(self, what: str) -> None:
        """Gather what may have changed since the last forward; a part of one that is computed again in a backward finds
        what that forward read."""
        if not in_backward():
            self.reads.late.forget()
            self.reads.late.complete()
            self._full.clear()
        if not self._full:
            self._gather(what)
        self._show()

    def _gather(self, what: str) -> None:
        ranks = self.reads.comm.world_size
        found = {
            id(param): (spec.described(param, ranks, owner.__dict__.get("_zg_parallel", {}).get(name)), param)
            for owner, name, spec, param in self._places()
        }
        params = list(found.values())
        self._described = [each for each, _ in params]
        for _, param in params:
            delayed.read_eagerly(param)
        shards = [(each, local_tensor(param).detach()) for each, param in params]
        full = self.reads.gather_all(shards, what)
        if torch.is_grad_enabled():
            self.reads.late.expect(params)
            for tensor, (each, param) in zip(full, params, strict=True):
                if each.trainable:
                    tensor.requires_grad_().register_post_accumulate_grad_hook(_passing_on(self.reads, param))
        self._full = dict(zip(found, full, strict=True))
        self.bytes = sum(tensor.nbytes for tensor in full)

    def _places(self) -> Iterator[tuple[nn.Module, str, ShardSpec, nn.Parameter]]:
        """Where parameters of the backend are now; ``functional_call`` puts other tensors in their places."""
        for owner in (live for ref in self._owners if (live := ref()) is not None):
            for name, spec in owner.__dict__.get("_zg_specs", {}).items():
                param = owner._parameters[name]
                if param is not None and id(param) in self.reads.known:
                    yield owner, name, spec, param

    def _show(self) -> None:
        self.is_shown = True
        for owner, name, _, param in self._places():
            if id(param) in self._full:
                owner.__dict__.setdefault("_zg_unsharded", {})[name] = self._full[id(param)]

    def close(self) -> None:
        """Outside, parameters are sharded; a backward may come that computes a part of the forward again."""
        self.is_shown = False
        for owner in (ref() for ref in self._owners):
            if owner is not None:
                owner.__dict__.pop("_zg_unsharded", None)
        if not torch.is_grad_enabled():
            self._full.clear()

    def follow(self, inputs: Any, outputs: Any) -> Any:
        """Take part in the reduction of gradients if a backward comes through ``outputs``, whatever this rank read.

        A rank that read nothing may have outputs that need no gradient. It returns some that do and come from all
        ``inputs``, as those of the others do: programs behind them and before them are the same then.
        """
        if not torch.is_grad_enabled() or not any(each.trainable for each in self._described):
            return outputs
        if not any(tensor.requires_grad for tensor in tensors_of(outputs)):
            needing = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
            outputs = map_tensors(lambda tensor: _joined(tensor, needing), outputs)
        opened = weakref.ref(self)

        def begins(_: Tensor) -> None:
            live = opened()
            if live is not None:
                live._show()
                live.reads.late.reduce_after_backward(live._backward_ended)

        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(begins)
        return outputs

    def _backward_ended(self) -> None:
        self.close()
        self._full.clear()


def _joined(tensor: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return _Joined.apply(tensor, *inputs, torch.empty(0, requires_grad=True))  # type: ignore[no-any-return]


class _Joined(torch.autograd.Function):
    """A tensor that counts as computed from others, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *inputs: Tensor) -> Tensor:
        # Not the inputs: code that may change them in place, as it reads none, would not be allowed to.
        ctx.likes = [(each.shape, each.dtype, each.device) for each in inputs]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)


def _passing_on(reads: UncompiledReads, param: nn.Parameter) -> Callable[[Tensor], None]:
    def accumulated(full: Tensor) -> None:
        grad, full.grad = full.grad, None
        assert grad is not None
        reads.late.add(param, grad)

    return accumulated


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Unsharded] = weakref.WeakKeyDictionary()
# Of all backends: modules, which look here, know none.


@torch.compiler.disable
def begin(call: EagerForward) -> None:
    """A forward begins, the innermost one from now on, until it is closed: also where this raises, as a gather may."""
    running = FORWARDS.running
    running.append(call)
    if _may_open(running):
        if call.module in _KNOWN:
            _open(call)
        else:
            _open_uncompiled(running[:-1], call, call.compiles)


@torch.compiler.disable
def before_reading(compiles: bool) -> None:
    """Code that is not compiled is about to read a weight; ``compiles``: whether Dynamo compiles what it calls."""
    running = FORWARDS.running
    if _may_open(running):
        _open_uncompiled(running, running[-1], compiles)


def has_opened(code: CodeType) -> bool:
    """Whether weights that Dynamo has traced as sharded ones, in ``code``, are whole tensors from now on."""
    running = FORWARDS.running
    if _may_open(running):
        _open_uncompiled([call for call in running if code_of(call.function) is not code], running[-1], compiles=True)
    return any(call.opened is not None for call in running)


@torch.compiler.disable
def end(inputs: Any, outputs: Any) -> Any:
    """The innermost forward has made ``outputs`` of its ``inputs``; returns what its caller gets."""
    call = FORWARDS.running[-1]
    if _may_open(FORWARDS.running) and call.module is not None and _has_broken(call.module, call.function):
        _open(call)
    return call.opened.follow(inputs, outputs) if call.opened is not None else outputs


@torch.compiler.disable
def close(call: EagerForward) -> None:
    """``call`` is over, in whatever way."""
    FORWARDS.running.remove(call)
    if call.opened is not None:
        call.opened.close()


def _may_open(running: Sequence[EagerForward]) -> bool:
    reads = _reads(running[-1]) if running else None
    if reads is None or not reads.routes or any(call.opened is not None for call in running):
        return False
    # What is computed again in a backward is called by what autograd calls.
    return not (in_backward() and any(each.is_shown and running[-1].module in each.parts for each in _KNOWN.values()))


def _reads(call: EagerForward) -> UncompiledReads | None:
    return call.module.__dict__.get("_zg_reads") if call.module is not None else None


def _open_uncompiled(callers: Sequence[EagerForward], call: EagerForward, compiles: bool) -> None:
    """Open the outermost of ``callers`` whose code runs as the user wrote it and is why Dynamo has not compiled it;
    where Dynamo was told to compile nothing, the one that said so, or ``call``."""
    known = [caller for caller in callers if caller.module is not None]
    if not compiles:
        _open(known[-1] if known else call)
        return
    codes = running_codes()
    for broken in (each for each in known if _runs_broken(each, codes)):
        _open(broken)
        return


def _runs_broken(call: EagerForward, codes: Mapping[int, CodeType]) -> bool:
    part = codes.get(id(code_of(call.function)))
    return part is not None and call.module is not None and _breaks(call.module, part)


def _has_broken(module: nn.Module, function: Callable[..., Any]) -> bool:
    code = code_of(function)
    return code is not None and any(_breaks(module, part) for part in parts_of(code))


def _breaks(module: nn.Module, code: CodeType) -> bool:
    """Whether Dynamo leaves ``code``, of the forward of ``module`` or a part of it, uncompiled for what it does itself.

    Where a child is why, in a loop over children, that loop is taken for the same on all ranks.
    """
    place = line_of_break(code) if code not in _BREAKS else None
    if place is not None:
        children = {code_of(child.forward) for child in module.modules() if child is not module}
        _BREAKS[code] = not any(_contains(child, *place) for child in children if child is not None)
    breaks: bool = _BREAKS.get(code, False)
    return breaks


_BREAKS = ExactWeakKeyDictionary()  # of code, which may have no hash; whether it breaks
# Dynamo leaves code uncompiled, whoever's it is.


def _contains(code: CodeType, file: str, line: int) -> bool:
    lines = [number for _, _, number in code.co_lines() if number is not None]
    return code.co_filename == file and min(lines, default=0) <= line <= max(lines, default=-1)


def _open(call: EagerForward) -> None:
    module, reads = call.module, _reads(call)
    if module is None or reads is None:
        return
    code = code_of(call.function)
    place = f" ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})" if code is not None else ""
    what = f"forward of {type(module).__name__}{place}"
    unsharded = _KNOWN[module] = _KNOWN.get(module) or Unsharded(reads)
    if not unsharded.find(module):
        return
    unsharded.open(what)
    call.opened = unsharded
    if what not in reads.warned and reads.comm.rank == 0:
        log.warning(
            "the %s is not compiled: its parameters (%s), and then their gradients, are whole on every rank until the "
            "backward ends; ranks may read different ones",
            what,
            format_bytes(unsharded.bytes),
        )
    reads.warned.add(what)
