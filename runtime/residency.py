"""Which gathered buckets stay whole, and when they are stale.

Shards change in ways that no version counter records: fused and foreach optimizers update a DTensor's local tensor
below autograd, and ``p.data`` edits and loaded checkpoints are invisible by design. A kept bucket is therefore trusted
from a forward to its backward, and across forwards only while ``no_sync`` holds gradients back: until they are reduced
nothing can have stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerograph.plan import Param, Plan
from zerograph.runtime.hold import GradientHold


class StepCount:
    """Steps of any optimizer so far; shared by all frames of one backend."""

    def __init__(self) -> None:
        self.value = 0
        count = weakref.ref(self)

        def stepped(*_: Any) -> None:
            live = count()
            if live is not None:
                live.value += 1

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)


class GatheredCache:
    """The buckets of one frame that stay whole after their last use, as the plan's residencies say."""

    def __init__(self, plan: Plan, steps: StepCount, hold: GradientHold) -> None:
        self._residency = {b.index: b.residency for b in plan.buckets}
        self._steps, self._hold = steps, hold
        self._full: dict[int, Mapping[str, Tensor]] = {}
        self._gathered_at = -1

    def enter(self, kind: str) -> None:
        """Called at the start of every program: drop what may be stale."""
        if self._steps.value != self._gathered_at or (kind != "backward" and not self._hold.open):
            self._full.clear()
            self._gathered_at = self._steps.value

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
