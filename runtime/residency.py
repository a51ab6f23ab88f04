"""Which gathered buckets stay whole, and when they are stale.

Shards change in ways that no version counter records: fused and foreach optimizers update a DTensor's local tensor
below autograd, and ``p.data`` edits are invisible by design. A cached bucket is therefore trusted only inside one
*accumulation window*: no optimizer has stepped, no parameter's version or memory has changed, and every gradient is the
one the last backward left.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerograph.plan import Param, Plan


class ShardWatch:
    """Notices that shards may have changed; shared by all frames of one backend."""

    def __init__(self) -> None:
        self.epoch = 0
        self._params: dict[str, weakref.ref[Tensor]] = {}
        self._state: dict[str, tuple[int, int]] = {}
        self._grads: dict[str, tuple[int, int] | None] = {}
        self._left: dict[str, tuple[int, int]] = {}
        watch = weakref.ref(self)

        def stepped(*_: Any) -> None:
            live = watch()
            if live is not None:
                live.bump()

        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, self._hook.remove)

    def add(self, name: str, param: Tensor) -> None:
        """Watch ``param``, the outward face of the parameter ``name``."""
        self._params[name] = weakref.ref(param)
        self._state[name] = _state(param)
        self._grads.pop(name, None)
        self._track_grad(name, param)

    def follow(self, names: Sequence[str]) -> None:
        """Notice gradients of the parameters ``names``, some of which may have been frozen when they were added."""
        for name in names:
            param = self._params[name]() if name in self._params else None
            if param is not None:
                self._track_grad(name, param)

    def _track_grad(self, name: str, param: Tensor) -> None:
        if name in self._grads or not param.requires_grad:
            return
        watch = weakref.ref(self)

        def accumulated(p: Tensor) -> None:
            live = watch()
            if live is not None and p.grad is not None:
                live._grads[name] = live._left[name] = (id(p.grad), p.grad._version)

        self._grads[name] = None
        param.register_post_accumulate_grad_hook(accumulated)

    def bump(self) -> None:
        """Declare all shards changed."""
        self.epoch += 1

    def refresh(self, names: Sequence[str]) -> int:
        """The epoch, after a look at the parameters ``names``."""
        changed = False
        for name in names:
            param = self._params[name]()
            if param is None:
                continue
            self._track_grad(name, param)
            state = _state(param)
            changed |= state != self._state[name] or self._grad_changed(name, param)
            self._state[name] = state
        if changed:
            self.bump()
        return self.epoch

    def _grad_changed(self, name: str, param: Tensor) -> bool:
        seen = self._grads.get(name)
        if seen is None:
            return False
        if param.grad is None or seen != (id(param.grad), param.grad._version):
            self._grads[name] = None
            return True
        return False

    def grad_cleared(self, name: str) -> bool:
        """Whether the gradient that the last backward left was taken away or zeroed (``zero_grad``)."""
        ref, seen = self._params.get(name), self._left.get(name)
        param = ref() if ref is not None else None
        if param is None or seen is None:
            return False
        return param.grad is None or seen != (id(param.grad), param.grad._version)


def _state(param: Tensor) -> tuple[int, int]:
    local = getattr(param, "_local_tensor", param)
    return param._version, local.data_ptr()


class GatheredCache:
    """The buckets of one frame that stay whole after their last use, as the plan's residencies say."""

    def __init__(self, plan: Plan, watch: ShardWatch) -> None:
        self._residency = {b.index: b.residency for b in plan.buckets}
        self._names = [p.name for b in plan.buckets if b.residency != "use" for p in b.params if p.sharded]
        self._watch = watch
        self._full: dict[int, Mapping[str, Tensor]] = {}
        self._epoch = -1

    def enter(self, kind: str) -> None:
        """Called at the start of every program: drop what may be stale."""
        if kind == "inference" or not self._names:
            return
        epoch = self._watch.refresh(self._names) if kind == "forward" else self._watch.epoch
        if epoch != self._epoch:
            self._full.clear()
            self._epoch = epoch

    def lookup(self, bucket: int, params: Sequence[Param]) -> list[Tensor] | None:
        """The full ``params``, when the bucket is whole."""
        full = self._full.get(bucket)
        if full is None or any(p.name not in full for p in params):
            return None
        return [full[p.name] for p in params]

    def store(self, bucket: int, params: Sequence[Param], full: Sequence[Tensor], kind: str) -> None:
        """Keep a bucket that a training program gathered, when its residency says so."""
        if kind != "inference" and self._residency[bucket] != "use":
            kept = {p.name: tensor for p, tensor in zip(params, full, strict=True)}
            self._full[bucket] = {**self._full.get(bucket, {}), **kept}

    def release(self, bucket: int, kind: str) -> bool:
        """Called at the bucket's free; returns whether it stays whole."""
        if self._residency[bucket] == "backward" and kind == "backward":
            self._full.pop(bucket, None)
        return bucket in self._full

    @property
    def bytes(self) -> int:
        """Bytes that stay whole between programs."""
        return sum(t.numel() * t.element_size() for full in self._full.values() for t in full.values())


class GradientHold:
    """Full gradients that ``no_sync`` keeps back until the next synchronized backward."""

    def __init__(self, watch: ShardWatch) -> None:
        self.active = False
        self._held: dict[str, Tensor] = {}
        self._watch = watch

    def add(self, params: Sequence[Param], grads: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Tensor]:
        """Hold ``grads`` back; returns zeros of the shards' shapes for autograd."""
        self._watch.follow([p.name for p in params])
        for param, total in zip(params, self.take(params, grads), strict=True):
            self._held[param.name] = total
        return [torch.zeros_like(s) for s in shards]

    def take(self, params: Sequence[Param], grads: Sequence[Tensor]) -> list[Tensor]:
        """``grads`` plus what was held for the same parameters, which is no longer."""
        return [self._with_held(p, g) for p, g in zip(params, grads, strict=True)]

    def _with_held(self, param: Param, grad: Tensor) -> Tensor:
        held = self._held.pop(param.name, None)
        if held is None or self._watch.grad_cleared(param.name):
            return grad
        return held.to(getattr(torch, param.reduce_dtype)) + grad
