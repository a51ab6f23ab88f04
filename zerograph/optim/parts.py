"""The tensors of one parameter group as the kernels take them: gathered once, and again when one of them moved."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zerograph._core as _core
from zerograph.optim.tensors import NOTHING, TAGS, Gradients, GroupLayout, uses_kernels
from zerograph.runtime.offload.blocks import StatePlace
from zerograph.runtime.offload.shards import ShardStore


@dataclass(slots=True)
class Member:
    """One parameter that has a gradient, with its state.

    Attributes:
        index: in its group.
        local: this rank's part.
        target: what is updated: ``local``, or its float32 master.
        states: local, in the order of the kernels' slots.
        step: how many updates it has had, one float32; None where the algorithm does not count.
        fresh: its momentum starts from this gradient.
        place: where its states are on NVMe; None where they are not.
        copy: in the dtype that computes, written when it is updated; None where that is not in memory here.
        through_device: its name in the store, where its update is computed on the device and its states are on the
        host; else
            empty.
        streamed: what of it passes through slots besides its states, by the store's names.
    """

    index: int
    local: Tensor
    target: Tensor
    states: list[Tensor]
    step: Tensor | None
    fresh: bool
    place: StatePlace | None = None
    copy: Tensor | None = None
    streamed: tuple[tuple[str, torch.dtype], ...] = ()
    through_device: str = ""


@dataclass(slots=True)
class Part:
    """Members that are updated together: of one dtype, one dtype of gradients, one device, with states on one tier.

    Attributes:
        members: in the group's order.
        indices: theirs.
        watched: what has the version counters of the parameters.
        tensors: their addresses; None where no kernel updates them at once: on a device, and with states on NVMe.
        grad_dtype: of all gradients.
        fresh: per member, until its first update; empty if none is.
    """

    members: list[Member]
    indices: list[int]
    watched: list[Tensor]
    grad_dtype: torch.dtype
    tensors: _core.TensorSet | None = None
    fresh: list[bool] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    @property
    def mastered(self) -> bool:
        return self.members[0].target is not self.members[0].local

    @property
    def stored(self) -> bool:
        """Whether states are on NVMe."""
        return self.members[0].place is not None

    @property
    def through_device(self) -> bool:
        """Whether states are on the host, and updated on the device."""
        return bool(self.members[0].through_device)

    def follow_copies(self) -> None:
        """Let masters follow low-precision parameters that something else has changed since the last update: where a
        parameter is not its master rounded, it is what counts."""
        if not self.mastered or [t._version for t in self.watched] == self._versions:
            return
        for m in self.members:
            # Only where they differ: a master has more digits than its parameter, which an untouched element must keep.
            changed = m.target.to(m.local.dtype) != m.local
            if not uses_kernels(m.local) or changed.any():  # a device is not waited for
                m.target.copy_(torch.where(changed, m.local.to(m.target.dtype), m.target))

    def updated(self, grads: Gradients) -> Sequence[Tensor]:
        """Tell autograd that the members with gradients have changed; returns what has their versions."""
        per_member = len(self.watched) // len(self.members)
        changed = self.watched
        if not grads.complete:
            changed = [t for i, t in enumerate(self.watched) if grads.addresses[i // per_member]]
        torch.autograd.graph.increment_version(changed)
        if self.fresh:
            self.fresh = [fresh and not a for fresh, a in zip(self.fresh, grads.addresses, strict=True)]
        if self.mastered:
            self._versions = [t._version for t in self.watched]
        return changed


class UpdateRow(NamedTuple):
    """Parameters of a group that are updated together.

    Attributes:
        key: under which their parts are kept.
        group: that they are in.
        layout, grads: of these parameters.
    """

    key: tuple[int, ...]
    group: Mapping[str, Any]
    layout: GroupLayout
    grads: Gradients


Located = tuple[ShardStore | None, int]
"""Who says where states are, and how often that has changed."""


class GroupParts:
    """All parts of one group, and what tells whether they still hold."""

    def __init__(
        self,
        layout: GroupLayout,
        slots: tuple[str, ...],
        parts: list[Part],
        state: Mapping[Tensor, Any],
        located: Located,
    ) -> None:
        self.layout, self.slots, self.parts, self._located = layout, slots, parts, located
        self._changes = layout.changes
        self._members = {m.index for part in parts for m in part.members}
        params = [layout.params[m.index] for part in parts for m in part.members]
        self._dicts = [state[p] for p in params if p in state]
        self._values = _values(self._dicts)
        self._locals = [t for part in parts for m in part.members for t in _of(m)]
        self._addresses = _addresses(self._locals)

    def holds(
        self, layout: GroupLayout, slots: tuple[str, ...], grads: Gradients, states: set[int], located: Located
    ) -> bool:
        """Whether the same tensors are to be updated, at the same addresses; ``states`` are the ids of the dicts that
        the optimizer holds now."""
        # Identities and addresses only: this is asked in every step, of hundreds of parameters.
        return (
            self.layout is layout
            and self.slots == slots
            and self._located == located
            and self._changes == layout.changes
            and self._covers(grads)
            and states.issuperset(map(id, self._dicts))
            and _same(self._values, _values(self._dicts))
            and _addresses(self._locals) == self._addresses
        )

    def is_complete(self, layout: GroupLayout, grads: Gradients) -> bool:
        """Whether they have all that has a gradient, and none is updated for the first time."""
        return self.layout is layout and self._covers(grads) and not any(any(part.fresh) for part in self.parts)

    def members_of(self, layout: GroupLayout, state: Mapping[Tensor, Any]) -> set[int]:
        """Those who may stay while they have no gradient: who has one may change from step to step."""
        stateful = bool(self._dicts)
        return {i for i in self._members if self.layout is layout and (not stateful or layout.params[i] in state)}

    def _covers(self, grads: Gradients) -> bool:
        if grads.complete:
            return len(self._members) == len(grads.tensors)
        return all(not a or i in self._members for i, a in enumerate(grads.addresses))


def _values(dicts: Sequence[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, dicts)))


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _of(member: Member) -> list[Tensor]:
    counted = [member.step] if member.step is not None else []
    mastered = [member.target] if member.target is not member.local else []
    return [*member.states, *mastered, *counted]


def parts_of(
    layout: GroupLayout, grads: Gradients, known: Container[int], member: Callable[[int], Member]
) -> list[Part]:
    """The parts of a group of the parameters with gradients and the ``known`` ones; ``member`` gives one's state."""
    kinds: dict[Hashable, list[tuple[Member, torch.dtype]]] = {}
    for index, grad in enumerate(grads.tensors):
        dtype = layout.dtypes[index]
        if dtype is None or (grad is None and index not in known):
            continue
        m = member(index)
        kind = (
            m.local.device,
            m.local.dtype,
            m.target.dtype,
            dtype,
            m.place is None,
            m.copy is None,
            m.streamed,
            not m.through_device,
        )
        kinds.setdefault(kind, []).append((m, dtype))
    found = []
    for alike in kinds.values():
        members, dtype = [m for m, _ in alike], alike[0][1]
        part = Part(
            members, [m.index for m in members], _watched(layout, members), dtype, fresh=[m.fresh for m in members]
        )
        if uses_kernels(members[0].local) and not (part.stored or part.through_device):
            part.tensors = tensor_set(members, part.mastered)
        found.append(part)
    return found


def _watched(layout: GroupLayout, members: Sequence[Member]) -> list[Tensor]:
    """As many per member, as :meth:`Part.updated` expects: parameters of one group are all sharded, or none is."""
    pairs = [(layout.params[m.index], m.local) for m in members]
    return [t for pair in pairs for t in pair] if any(p is not t for p, t in pairs) else [p for p, _ in pairs]


def tensor_set(members: Sequence[Member], mastered: bool) -> _core.TensorSet:
    """``members`` as kernels see them: by addresses, so that whoever calls those keeps them."""
    first = members[0]
    # The kernel writes what follows from an update: parameters of masters, or copies of parameters.
    follows = [m.local for m in members] if mastered else [m.copy for m in members if m.copy is not None]
    return _core.TensorSet(
        [(address(m.target), TAGS[m.target.dtype], m.target.numel()) for m in members],
        [[address(m.states[slot]) for m in members] for slot in range(len(first.states))],
        TAGS[first.states[0].dtype] if first.states else _core.DType.float32,
        list(map(address, follows)),
        TAGS[follows[0].dtype if follows else first.local.dtype],
        [address(m.step) for m in members if m.step is not None],
    )


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, in whatever order they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def address(tensor: Tensor, element: int = 0) -> int:
    """The address of an element of ``tensor``, counted in memory; never 0."""
    return (tensor.data_ptr() or NOTHING) + element * tensor.itemsize
