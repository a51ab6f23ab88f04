"""Collectives of a model of which ranks have some experts each: those are shared by fewer ranks than the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime.comm.communicator import Communicator, HostGathers
from zerograph.runtime.comm.paired import PairedCommunicator
from zerograph.runtime.own_stream import Wait


class _Under(NamedTuple):
    """A collective of one transport: the ``places`` of its parameters among all, and how many ranks have other experts
    each, by which their gradients are divided."""

    of: Communicator
    places: list[int]
    pending: Any
    experts: int


class ExpertCommunicator(PairedCommunicator):
    """``rank`` and ``world_size`` are those of all. One collective of it may be one of each transport."""

    def __init__(self, same: Communicator, everyone: Communicator) -> None:
        """``same`` connects the ranks that have the same experts as this one."""
        super().__init__(same, everyone)
        self.same, self.everyone = same, everyone
        self.name = f"{everyone.name}; of experts {same.name}"
        self.rank, self.world_size, self.pool = everyone.rank, everyone.world_size, everyone.pool
        self.per_host = everyone.per_host if isinstance(everyone, PairedCommunicator) else None

    def _parts(self, params: Sequence[Param]) -> Iterator[tuple[Communicator, list[int], list[Param], int]]:
        """What connects the ranks that share some of ``params``, the places of these, and what they are to it:
        parameters as all others."""
        for experts in dict.fromkeys(param.experts for param in params):
            places = [place for place, param in enumerate(params) if param.experts == experts]
            if experts == 1:
                yield self.everyone, places, [params[place] for place in places], 1
            else:
                yield self.same, places, [replace(params[place], experts=1) for place in places], experts

    def start_gather(
        self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
    ) -> list[_Under]:
        return [
            _Under(of, places, of.start_gather(own, [shards[place] for place in places], behind), experts)
            for of, places, own, experts in self._parts(params)
        ]

    def finish_gather(self, pending: list[_Under]) -> list[Tensor]:
        return _in_order((each.places, each.of.finish_gather(each.pending)) for each in pending)

    def host_parts(self, pending: list[_Under]) -> list[Tensor]:
        return _in_order((each.places, cast(HostGathers, each.of).host_parts(each.pending)) for each in pending)

    def start_gather_inside(self, params: Sequence[Param], parts: Sequence[Tensor]) -> list[_Under]:
        """See :class:`~zerograph.runtime.comm.communicator.HostGathers`. Plans keep no parts in steps with experts, as
        the ranks that have the same ones may not communicate in two levels."""
        return [
            _Under(of, at, cast(HostGathers, of).start_gather_inside(own, [parts[place] for place in at]), experts)
            for of, at, own, experts in self._parts(params)
        ]

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> list[_Under]:
        return [
            _Under(of, places, of.start_reduce(own, [grads[place] for place in places]), experts)
            for of, places, own, experts in self._parts(params)
        ]

    def finish_reduce(self, pending: list[_Under]) -> list[Tensor]:
        return _in_order((each.places, _mean(each)) for each in pending)

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Any:
        return self.everyone.start_exchange(sends, sizes)

    def finish_exchange(self, pending: Any) -> list[Tensor]:
        return self.everyone.finish_exchange(pending)


def _mean(pending: _Under) -> list[Tensor]:
    """Gradients of experts have those of what other ranks sent them, too: the mean is over all ranks."""
    found = pending.of.finish_reduce(pending.pending)
    return found if pending.experts == 1 else list(torch._foreach_div(found, pending.experts))


def _in_order(parts: Iterable[tuple[list[int], Sequence[Tensor]]]) -> list[Tensor]:
    found = {place: tensor for places, tensors in parts for place, tensor in zip(places, tensors, strict=True)}
    return [found[place] for place in range(len(found))]
