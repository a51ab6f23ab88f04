"""Which gathered buckets stay resident, and when they are stale.

Shards change in ways that no version counter records: fused and foreach optimizers update a DTensor's local tensor
below autograd, and ``p.data`` edits and loaded checkpoints are invisible by design. A resident bucket is therefore
trusted from a forward to its backward, and across forwards only while ``no_sync`` holds gradients back, as nothing can
have stepped until they are reduced, and inside of one schedule of a pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerograph.core.plan import Param
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.torch_private import local_tensor


def moving_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of an optimizer's groups whose parameters a step changes. DCP steps once with learning rates of 0, on some
    ranks, to make states."""
    return [group for group in groups if group.get("lr") != 0]


def params_in(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters of some groups of an optimizer."""
    return [p for group in groups for p in group["params"]]


class Pipeline(Protocol):
    """What an optimizer's step needs of the ranks that have other stages."""

    def add_up(self, numbers: Tensor) -> None:
        """``numbers``, on the CPU, over all ranks, in place."""

    def stop(self, reason: str) -> None:
        """A step failed on this rank."""


class StepCount:
    """Steps of optimizers so far; shared by all frames of one backend.

    Attributes:
        value: of optimizers that write to memory of the backend's parameters, these themselves or views of them.
        own: of those that move parameters of the backend, as all ranks must have taken alike.
        pipelines: ranks that have other stages, by their group, where an error of one ends the others' waits.
        parts: the stages of these, whose parameters a backend of one rank alone does not know otherwise.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """``params`` are the backend's by name, now and later."""
        self.value = self.own = 0
        self.pipelines = weakref.WeakKeyDictionary[ProcessGroup, Pipeline]()
        self.parts = weakref.WeakSet[nn.Module]()
        self._params = params
        count = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            live = count()
            if live is not None:
                live._stepped(optimizer)

        # torch's hooks are global: without the weak reference every backend would live to the end of the process.
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def begin_again(self) -> None:
        """A checkpoint was loaded, by all ranks alike: whatever steps they had taken before counts no longer."""
        self.own = 0

    def updated(self) -> None:
        """Programs see an update that has ended behind its step: for what they keep, and for other ranks, that is a
        step of its own."""
        self.value += 1
        self.own += 1

    def pipelines_of(self, optimizer: Optimizer) -> Mapping[ProcessGroup, Pipeline]:
        """:attr:`pipelines`, if ``optimizer`` updates parameters of theirs."""
        held = params_in(optimizer.param_groups) if self.pipelines else ()
        return {} if self._known.isdisjoint(map(id, held)) else self.pipelines

    @property
    def _known(self) -> set[int]:
        return {id(p) for p in (*self._params.values(), *(p for part in self.parts for p in part.parameters()))}

    def _stepped(self, optimizer: Optimizer) -> None:
        groups, known = optimizer.param_groups, self._known
        held = params_in(groups)
        # One of a probe on one rank alone is nothing to us, where other ranks trust what they have gathered.
        self.value += any(id(p) in known for p in held) or self._share_memory(held)
        self.own += any(id(p) in known for p in params_in(moving_groups(groups)))

    def _share_memory(self, tensors: Iterable[Tensor]) -> bool:
        try:
            return not _memory(tensors).isdisjoint(_memory(self._params.values()))
        except RuntimeError:  # one of a class without memory of its own: it may stand for ours
            return True


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    return {local_tensor(t).untyped_storage().data_ptr() for t in tensors if not t.is_meta} - {0}


class Buckets:
    """Tensors of buckets that stay, by parameter; of those that may be stale, a bucket goes when it is asked for."""

    def __init__(self) -> None:
        self._there: dict[int, Mapping[str, Tensor]] = {}
        self._stale: set[int] = set()

    def lookup(self, bucket: int, params: Sequence[Param]) -> list[Tensor] | None:
        """Those of ``params``, when all are there."""
        self.drop_stale(bucket)
        there = self._there.get(bucket)
        if there is None or any(p.name not in there for p in params):
            return None
        return [there[p.name] for p in params]

    def store(self, bucket: int, params: Sequence[Param], tensors: Sequence[Tensor]) -> None:
        """Keep what a program gathered of ``params``."""
        self.drop_stale(bucket)
        own = {p.name: tensor for p, tensor in zip(params, tensors, strict=True)}
        # A program gathers those parameters of a bucket that it reads; another one may have gathered the others.
        self._there[bucket] = {**self._there.get(bucket, {}), **own}

    def drop(self, bucket: int) -> None:
        """No later program finds the bucket, if it is here."""
        self._there.pop(bucket, None)

    def holds(self, bucket: int) -> bool:
        """Whether anything of the bucket is here."""
        return bucket in self._there

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here."""
        return not self._there

    def turn_stale(self) -> None:
        """What is here now, nobody finds any more."""
        self._stale = set(self._there)

    def drop_all_stale(self) -> None:
        """All that is stale goes at once."""
        for bucket in tuple(self._stale):
            self.drop_stale(bucket)

    def drop_stale(self, bucket: int) -> None:
        """The bucket goes, if it is stale."""
        if bucket in self._stale:
            self._stale.remove(bucket)
            self.drop(bucket)

    def clear(self) -> None:
        """All goes."""
        self._there.clear()
        self._stale.clear()

    @property
    def bytes(self) -> int:
        """Bytes that stay between programs."""
        return sum(t.numel() * t.element_size() for own in self._there.values() for t in own.values())


class GatheredCache(Buckets):
    """The buckets of one frame that stay resident after their last use in a program.

    Attributes:
        in_host: this rank's parts of those that its host keeps in place of whole ones.
    """

    def __init__(self, steps: StepCount, accumulation: GradientAccumulation) -> None:
        super().__init__()
        self.in_host = Buckets()
        self._steps, self._accumulation = steps, accumulation
        self._gathered_at: tuple[int, int, object] = (-1, 0, None)

    @property
    def steps(self) -> int:
        """Optimizer steps over the backend's parameters."""
        return self._steps.own

    def enter(self, kind: str, generation: int = 0) -> None:
        """Called at the start of every program: drop what may be stale.

        A forward drops it bucket by bucket, as it gathers: each then finds its own memory free. Dropped at once, most
        of it would go back to the system, to be asked for again page by page.

        Ranks that met after an error may have different buckets resident: those of an older ``generation`` go.
        """
        schedule = self._accumulation.schedule
        now = (self._steps.value, generation, schedule)
        # Whether gradients are held may have to be read from a device: it is asked where it matters.
        nothing = self.is_empty and self.in_host.is_empty
        trusted = kind == "backward" or nothing or schedule is not None or self._accumulation.open
        if now != self._gathered_at or not trusted:
            self._gathered_at = now
            self.turn_stale()
            self.in_host.turn_stale()
        if kind != "forward":
            self.drop_all_stale()
            self.in_host.drop_all_stale()

    def clear(self) -> None:
        """Called when a program fails."""
        super().clear()
        self.in_host.clear()
