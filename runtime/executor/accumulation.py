"""Full gradients that ``no_sync`` keeps back until the next synchronized backward; or, where an optimizer averages
something else, for that (:mod:`~zerograph.runtime.executor.local_gradients`).

Meanwhile each parameter's ``.grad`` gets nothing from them, and marks them: where it would be zero it is *negative*
zero, which adds like zero and tells, whatever zeroed it, that the user dropped the gradients (``zero_grad``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from zerograph.core.errors import UnsupportedError, ZeroGraphError
from zerograph.core.plan import Param, ParamTile
from zerograph.runtime.buffers import add_to_tile, torch_dtype
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, sequence_of
from zerograph.runtime.executor import local_gradients
from zerograph.runtime.torch_private import (
    FOLLOWS,
    Goes,
    accumulated_directly,
    after_backward,
    current_backward,
    gradient_goes,
    local_tensor,
)


class GradientAccumulation:
    """The held gradients of one backend, over all its frames.

    Attributes:
        holding: whether ``no_sync`` holds gradients back, so that another backward is to follow before a step.
        late: parameters whose held gradients others reduce.
        schedule: stands for the schedule of a pipeline that runs; None outside of one.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """``params`` are the outward parameters by name, now and later."""
        self.holding = False
        self.schedule: object | None = None
        self.late: set[str] = set()
        self._params = params
        self._held: _Held = {}
        self._left: dict[str, tuple[Tensor, int]] = {}  # each gradient and its version as the last backward left it
        self._flushing: int | None = None  # the backward at whose end the rest is reduced
        self._seen: dict[str, Values] = {}  # of gradients on a device, since the beginning of a backward
        self._seen_in: int | None = None  # that backward
        # Whether a gradient that tells had been dropped before a backward that runs; None where none tells.
        self._told: dict[int, bool | None] = {}
        self._following: dict[str, weakref.ref[Tensor]] = {}  # the tensors whose gradients a hook follows
        self._comm: Communicator

    @property
    def active(self) -> bool:
        """Whether gradients are held back: inside of ``no_sync``, and where an optimizer takes them."""
        return self.holding or self.taker is not None

    @property
    def taker(self) -> local_gradients.LocalGradients | None:
        """Who takes gradients that are held back."""
        return local_gradients.taker(self._params.values())

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Inside, gradients are held back."""
        before, self.holding = self.holding, True
        try:
            yield
        finally:
            self.holding = before

    @contextmanager
    def one_schedule(self) -> Iterator[None]:
        """Inside, forwards and backwards follow each other in any order, and nobody changes a parameter."""
        before, self.schedule = self.schedule, object()
        try:
            yield
        finally:
            self.schedule = before

    @property
    def state(self) -> tuple[_Held, dict[str, tuple[Tensor, int]]]:
        """The gradients held now; set to it again when a backward fails, it is as before that backward."""
        return {name: dict(parts) for name, parts in self._held.items()}, dict(self._left)

    @state.setter
    def state(self, before: tuple[_Held, dict[str, tuple[Tensor, int]]]) -> None:
        self._held, self._left = {name: dict(parts) for name, parts in before[0].items()}, dict(before[1])

    @property
    def names(self) -> Sequence[str]:
        """Parameters whose gradients are held."""
        return tuple(self._held)

    @property
    def open(self) -> bool:
        """Whether gradients are held that the user did not drop, as one of them tells."""
        name = next(iter(self._held), None)
        left = self._left.get(name) if name is not None else None
        self._seen.clear()
        return name is not None and (left is None or not self._dropped(name, *left))

    def hold(self, params: Sequence[Param], grads: Sequence[Tensor], comm: Communicator) -> list[Tensor]:
        """Hold back those of ``grads`` that this backward adds to ``.grad``; returns for autograd negative zeros of the
        shards' shapes, also in the places of the others, which it throws away.

        Raises:
            UnsupportedError: ``torch.autograd.grad`` asks for one of them.
        """
        goes = self._goes(params)
        returned = next((p.name for p, to in zip(params, goes, strict=True) if to == "returned"), None)
        if returned is not None:
            taker = self.taker
            raise UnsupportedError(
                f"torch.autograd.grad for {returned}, or for tensors that it is computed from, while "
                f"{'no_sync()' if self.holding or taker is None else taker.name} leaves each rank its own gradients: "
                "nothing could average them later",
                "call torch.autograd.grad outside of no_sync() and before the freeze_step of OneBitAdam, or backward()",
            )
        added = [(p, grad) for p, grad, to in zip(params, grads, goes, strict=True) if to == "added"]
        self._keep([p for p, _ in added], [grad for _, grad in added], comm)
        return self._marks(params, comm)

    def _goes(self, params: Sequence[Param]) -> list[Goes]:
        direct = accumulated_directly()
        return [gradient_goes(self._params[p.name], direct) for p in params]

    def add(self, params: Sequence[Param], grads: Sequence[Tensor], comm: Communicator) -> list[Tensor]:
        """Hold ``grads`` back; returns negative zeros of the shards' shapes for autograd."""
        self._keep(params, grads, comm)
        return self._marks(params, comm)

    def _keep(self, params: Sequence[Param], grads: Sequence[Tensor], comm: Communicator) -> None:
        self._comm = comm
        totals = [self._with_held(p, g) for p, g in zip(params, grads, strict=True)]
        for param, total in zip(params, totals, strict=True):
            self._held.setdefault(param.name, {})[_rows(param)] = (param, total)
            self._follow(param.name)

    def _marks(self, params: Sequence[Param], comm: Communicator) -> list[Tensor]:
        def mark(p: Param) -> Tensor:
            device = local_tensor(self._params[p.name]).device
            return torch.full(p.shard_shape(comm.rank), -0.0, dtype=torch_dtype(p.dtype), device=device)

        return list(map(mark, params))

    def mark(self, name: str) -> Tensor:
        """The tensor for autograd in place of a gradient that is held back in tiles."""
        return torch.full_like(local_tensor(self._params[name]), -0.0)

    def take(self, params: Sequence[Param], grads: Sequence[Tensor]) -> list[Tensor]:
        """``grads`` of a synchronized backward. Those that it adds to ``.grad`` come with what was held for the same
        parameters, which is no longer, and gradients held for other parameters are then reduced when it ends."""
        if not self._held:
            return list(grads)
        adds = [to == "added" for to in self._goes(params)]
        merged = [self._with_held(p, g) if own else g for p, g, own in zip(params, grads, adds, strict=True)]
        if self._held and any(adds):
            self._flush_after_backward()
        return merged

    def _with_held(self, param: Param, grad: Tensor) -> Tensor:
        held = self.withdraw(param)
        # In the dtype of the reduction: micro-batches in 16 bit would round away small gradients.
        return grad if held is None else held.to(torch_dtype(param.reduce_dtype)) + grad

    def withdraw(self, param: Param) -> Tensor | None:
        """The gradient held for ``param``, unless the user dropped it; nothing is held for it afterwards."""
        left = self._left.get(param.name)
        if left is not None:
            # Asked once: the first tiles of a gradient may be there, off the device, before the others come.
            dropped = self._dropped(param.name, *left)
            del self._left[param.name]
            if dropped:
                self._held.pop(param.name, None)
        parts = self._held.get(param.name, {})
        _, held = parts.pop(_rows(param), (None, None))
        if not parts:
            self._held.pop(param.name, None)
        return held

    def _dropped(self, name: str, left: Tensor, version: int) -> bool:
        """Whether the gradient that the last backward left was taken away or zeroed.

        A rank without rows of it has nothing to look at: zero_grad treats all alike, so another one tells.

        Raises:
            ZeroGraphError: it was changed in another way, which the held part did not see.
        """
        if current_backward() != _OUTSIDE:
            self._told_by_another()  # while there is another
        if self._tells(name):
            return self._was_dropped(name, left, version)
        grad, told = self._params[name].grad, self._told_by_another()
        # Where no other tells, whoever wrote to it has zeroed it.
        return grad is not left or grad._version != version if told is None else told

    def _told_by_another(self) -> bool | None:
        """Whether a gradient that tells had been dropped when the backward that runs began; None where none tells.
        Later in it gradients are withdrawn, or left anew."""
        backward = current_backward()
        if backward in self._told:
            return self._told[backward]
        other = next(filter(self._tells, self._left), None)
        told = None if other is None else self._was_dropped(other, *self._left[other])
        if backward != _OUTSIDE:  # backwards may be inside of one another
            self._told[backward] = told
            after_backward(partial(self._told.__delitem__, backward))
        return told

    def _tells(self, name: str) -> bool:
        grad = self._params[name].grad
        return grad is None or local_tensor(grad).numel() > 0

    def _was_dropped(self, name: str, left: Tensor, version: int) -> bool:
        grad = self._params[name].grad
        if grad is None:
            return True
        values = self._values(name, local_tensor(grad))
        if values == "zeros" or (grad is not left and values != "marks"):
            return True
        if grad is not left or grad._version != version:  # another tensor with the mark was computed from the gradient
            local_gradients.refuse_reading([self._params[name]])
            raise ZeroGraphError(
                f"the gradient of {name} was changed while no_sync() held back a part of it",
                "change gradients after a backward outside of no_sync(), which completes them",
            )
        return False

    def _values(self, name: str, local: Tensor) -> Values:
        if _is_read_at_once(local):
            return values_of([local])[0]
        if name not in self._seen or self._seen_in != current_backward():
            self._look()
        return self._seen[name]

    def _look(self) -> None:
        """Read all gradients that a backward left on a device, so that it is waited for once."""
        grads = {name: self._params[name].grad for name in self._left}
        there = {name: local_tensor(grad) for name, grad in grads.items() if grad is not None}
        there = {name: local for name, local in there.items() if local.numel() and not _is_read_at_once(local)}
        self._seen = dict(zip(there, values_of(list(there.values())), strict=True))
        self._seen_in = current_backward()

    def _follow(self, name: str) -> None:
        """Let a hook record what each backward leaves in ``.grad``; once for each tensor that bears the name."""
        param, known = self._params[name], self._following.get(name)
        if known is not None and known() is param:
            return
        # A hook lives as long as its parameter, and must not keep a backend that is gone, with its gradients.
        accumulation = weakref.ref(self)

        def accumulated(p: Tensor) -> None:
            live = accumulation()
            if live is not None and name in live._held:
                live._accumulated(name, p)

        accumulated.__dict__[FOLLOWS] = True
        param.register_post_accumulate_grad_hook(accumulated)
        self._following[name] = weakref.ref(param)

    def _accumulated(self, name: str, param: Tensor) -> None:
        self._seen.pop(name, None)
        if not self.active:  # a backward that no program reduced: the model ran uncompiled
            left, version = self._left.get(name, (None, 0))
            # One bump is autograd's own addition. More than one: the user changed the gradient as well, and
            # ``_dropped`` will say so.
            if param.grad is left and left is not None and left._version == version + 1:
                self._left[name] = (left, version + 1)
            self._flush_after_backward()
        elif param.grad is not None:
            # The version alone cannot tell: _foreach_zero_ of a DTensor, which zero_grad(set_to_none=False) may call,
            # bumps none. So a gradient of zeros becomes negative zeros: they add like zeros, and whatever zeroes them
            # writes positive ones. Marked anew after each backward, since -0.0 + 0.0 is 0.0.
            _mark_zeros(local_tensor(param.grad))
            self._left[name] = (param.grad, param.grad._version)

    def _flush_after_backward(self) -> None:
        backward = current_backward()
        # In a schedule other stages hold theirs until their own last backward.
        if self._flushing != backward and self.schedule is None:  # one that failed has not flushed
            self._flushing = backward
            after_backward(self._flush)

    def _flush(self) -> None:
        """Reduce what this backward left held: gradients of parameters that it did not read."""
        self._flushing = None
        self.reduce_held(lambda _: True)

    @torch.no_grad()
    def reduce_held(self, wanted: Callable[[Tensor], bool]) -> None:
        """Reduce gradients that are held for the parameters that are ``wanted``."""
        self.forget_dropped()  # while all that tell are there
        before = self.state
        held = [param for parts in self._held.values() for param, _ in parts.values()]
        held_here = [p for p in held if p.name not in self.late and wanted(self._params[p.name])]
        found = [(param, self.withdraw(param)) for param in held_here]
        left = [(param, held.to(torch_dtype(param.reduce_dtype))) for param, held in found if held is not None]
        if not left:
            return
        params = [param for param, _ in left]
        comm = self._comm
        sequence = sequence_of(param.name for param in params)
        try:
            with together(comm, Entry("reduction of gradients that no_sync() held back", sequence, comm.steps)):
                results = comm.finish_reduce(comm.start_reduce(params, [held for _, held in left]))
        except BaseException:
            self.state = before
            raise
        for param, result in zip(params, results, strict=True):
            grad = self._params[param.name].grad
            assert grad is not None  # else nothing would have been left to reduce
            add_to_tile(param, local_tensor(grad), result)

    def of_this_rank(self) -> dict[int, Tensor]:
        """The full gradients that are held, by ``id`` of the outward parameter. They stay so until they are dropped.

        Raises:
            UnsupportedError: the part of one that is not held was changed, as by clipping.
        """
        self.forget_dropped()
        return {id(self._params[name]): held for name, parts in self._held.items() for _, held in parts.values()}

    def left_out(self, own: Container[int]) -> list[str]:
        """Names of trainable parameters whose ``id`` is not among ``own``."""
        return [name for name, param in self._params.items() if param.requires_grad and id(param) not in own]

    def forget_dropped(self) -> None:
        """Let go of gradients that the user dropped."""
        self._seen.clear()
        dropped = [name for name in self._held if name in self._left and self._dropped(name, *self._left[name])]
        for name in dropped:
            del self._held[name], self._left[name]

    def refuse_step(self) -> None:
        """Raises:
        ZeroGraphError: an optimizer steps on gradients that lack a part held back.
        """
        self.forget_dropped()
        taker = self.taker
        if self._held and taker is not None:
            raise ZeroGraphError(
                f"an optimizer steps while {taker.name}, which still lives, leaves each rank its own gradients of "
                f"{len(self.names)} parameters, the first of {self.names[0]}",
                "let go of it (del optimizer; gc.collect()) before the backward",
            )
        if self._held:
            raise ZeroGraphError(
                f"an optimizer steps while no_sync() holds back gradients of {len(self.names)} parameters, "
                f"the first of {self.names[0]}",
                "run the backward of the last micro-batch outside of no_sync()",
            )


_OUTSIDE = -1
"""Number of the backward where none runs."""

_Held = dict[str, dict[tuple[int, int] | None, tuple[Param, Tensor]]]
"""Gradients by the parameter's name, and the rows of its shards at which a tile begins and ends; None is the whole."""


def _rows(param: Param) -> tuple[int, int] | None:
    return (param.begin, param.end) if isinstance(param, ParamTile) else None


Values = Literal["marks", "zeros", "others"]
"""All that a gradient has: negative zeros, the mark of one that is held back; other zeros too; or anything else."""


def values_of(locals: Sequence[Tensor]) -> list[Values]:
    """The kind of values in each of the tensors, none of which is empty. A device is waited for once."""
    there = [flag for t in locals if not _is_read_at_once(t) for flag in (t.any(), t.signbit().all())]
    read = iter(torch.stack(there).tolist() if there else ())
    found: list[Values] = []
    for t in locals:
        if _is_read_at_once(t):
            some = bool(t.any())
            all_signed = not some and bool(t.signbit().all())
        else:
            some, all_signed = next(read), next(read)
        found.append("others" if some else "marks" if all_signed else "zeros")
    return found


def are_marks(grads: Sequence[Tensor | None]) -> list[bool]:
    """Whether each ``.grad`` is none, or has nothing but the marks of a gradient that was held back."""
    local = [None if grad is None else local_tensor(grad) for grad in grads]
    values = iter(values_of([t for t in local if t is not None and t.numel()]))
    return [t is None or not t.numel() or next(values) == "marks" for t in local]


def _mark_zeros(local: Tensor) -> None:
    """Make zeros negative, if nothing else is there."""
    if not _is_read_at_once(local):
        local.masked_fill_(~local.any(), -0.0)
    elif not local.any():
        local.fill_(-0.0)


def _is_read_at_once(local: Tensor) -> bool:
    """Whether the host can look at ``local`` without waiting for a device."""
    return local.is_cpu
