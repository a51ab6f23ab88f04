"""Ranks that are threads of this process: collectives between them, in their order, with nothing that a clock decides.

One rank runs at a time: a rank that waits for the others hands over to them, so a run repeats itself exactly, and each
rank has the random numbers of its own process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.core.plan import Param
from zerograph.runtime.buffers import allocate_full, torch_dtype
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, describe_difference
from zerograph.runtime.comm.packing import gradient_message, padded_shards

CPU = torch.device("cpu")
T = TypeVar("T")
TIMEOUT = 60.0
"""Seconds a rank waits for the others before it fails."""


@dataclass(slots=True)
class _Collective:
    """What the ranks gave to one collective.

    Attributes:
        name: what it does, and on which parameters, as the first rank said.
        given: by rank.
        taken: ranks that have the result.
    """

    name: str
    given: dict[int, Any] = field(default_factory=dict)
    taken: int = 0


class ThreadGroup:
    """Where ``size`` ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [ThreadCommunicator(self, rank) for rank in range(size)]
        self._turn = threading.Condition()
        self._collectives: dict[int, _Collective] = {}  # by number
        self._failed: dict[int, str] = {}

    def run(self, function: Callable[[T], Any], given: Sequence[T]) -> list[Any]:
        """The results of ``function`` on every rank, which gets what is ``given`` for it.

        Raises:
            Exception: that of the first rank that failed.
        """
        with ThreadPoolExecutor(self.size, "rank") as threads:
            futures = [threads.submit(self._in_turn, rank, function, each) for rank, each in enumerate(given)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda failure: isinstance(failure, RankError)):
            raise error
        return [future.result() for future in futures]

    def _in_turn(self, rank: int, function: Callable[[T], Any], given: T) -> Any:
        with self._turn:
            # Else MKL takes OpenMP's count until the first loop of torch.
            torch.set_num_threads(torch.get_num_threads())
            torch.manual_seed(0)
            try:
                return function(given)
            except BaseException as error:
                self.fail(rank, f"{type(error).__name__}: {error}")
                raise

    def give(self, rank: int, number: int, name: str, value: Any) -> None:
        """Post what ``rank`` contributes to its collective of that ``number``."""
        found = self._collectives.setdefault(number, _Collective(name))
        if found.name != name:
            raise CollectiveMismatch(f"rank {rank} does {name!r} where another rank does {found.name!r}", "")
        found.given[rank] = value
        self._turn.notify_all()

    def take(self, number: int) -> list[Any]:
        """What all ranks gave to it, by rank, once they have."""
        found = self._collectives[number]
        with torch.random.fork_rng(devices=()):  # the others draw numbers of their own
            came = self._turn.wait_for(lambda: len(found.given) == self.size or self._failed, TIMEOUT)
        if len(found.given) < self.size:
            why = "; ".join(f"rank {r}: {text}" for r, text in self._failed.items())
            raise RankError(f"{found.name}: {why if came else 'the others do not come'}", "")
        found.taken += 1
        if found.taken == self.size:
            del self._collectives[number]
        return [found.given[rank] for rank in range(self.size)]

    def fail(self, rank: int, why: str) -> None:
        """Let the other ranks fail too."""
        self._failed.setdefault(rank, why)
        self._turn.notify_all()


@dataclass(slots=True)
class _Pending:
    number: int
    params: Sequence[Param]


class ThreadCommunicator(Communicator):
    """One rank's end of a :class:`ThreadGroup`.

    A result holds not-a-number until it is waited for, and what was sent may change from then on only.
    """

    name = "threads"

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.world_size, self.steps = group, rank, group.size, 0
        self._begun = 0
        self._flying: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # what was sent, and copies of it

    def rejoin(self) -> None:
        """Ranks do not go on after an error."""

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """Compare what the ranks begin."""
        self.steps = entry.steps
        entries = self.group.take(self._give("enter", entry))
        for rank, theirs in enumerate(entries):
            if theirs != entry:
                raise describe_difference(entry, rank, theirs, self.rank)

    def leave(self) -> None:
        """Wait for the others; nothing may be under way."""
        assert not self._flying, f"{len(self._flying)} collectives were never waited for"
        self.group.take(self._give("leave", None))

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Any] = ()) -> _Pending:
        """Send this rank's rows."""
        return self._start("gather", params, padded_shards(params, shards, CPU))

    def finish_gather(self, pending: _Pending) -> list[Tensor]:
        """The full parameters."""
        by_rank = self._finish(pending)
        full = allocate_full(pending.params, CPU)
        for place, flat in enumerate(full.padded):
            flat.copy_(torch.cat([sent[place] for sent in by_rank]))
        return full.tensors

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _Pending:
        """Send the full gradients."""
        for grad in grads:
            assert not grad.isnan().any(), "a gradient is reduced before it is there"
        sent = [
            gradient_message([p], [g], torch_dtype(p.reduce_dtype), CPU)
            if p.sharded
            else g.detach().to(torch_dtype(p.reduce_dtype)).reshape(1, -1)
            for p, g in zip(params, grads, strict=True)
        ]
        return self._start("reduce", params, sent)

    def finish_reduce(self, pending: _Pending) -> list[Tensor]:
        """This rank's rows of the means, added up in the order of ranks."""
        by_rank, results = self._finish(pending), []
        for place, param in enumerate(pending.params):
            row = self.rank if param.sharded else 0
            total = by_rank[0][place][row].clone()
            for sent in by_rank[1:]:
                total += sent[place][row]
            shape = param.shard_shape(self.rank)
            mean = (total / self.world_size).to(torch_dtype(param.dtype))
            results.append(mean[: prod(shape)].view(shape))
        return results

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> int:
        """Send each rank its message."""
        assert [send.numel() for send in sends] == list(sizes[self.rank]), (
            "messages are not of the sizes that were said"
        )
        copies = [send.clone() for send in sends]
        number = self._give(f"exchange {sizes}", copies)
        self._flying[number] = list(sends), copies
        return number

    def finish_exchange(self, pending: int) -> list[Tensor]:
        """What the others sent to this rank."""
        by_rank = self.group.take(pending)
        sent, copies = self._flying.pop(pending)
        assert all(map(torch.equal, sent, copies)), "a message changed while it was sent"
        return [messages[self.rank].clone() for messages in by_rank]

    def abort(self, reason: str) -> None:
        """Let the others fail too."""
        self.group.fail(self.rank, reason)

    def _start(self, what: str, params: Sequence[Param], sent: list[Tensor]) -> _Pending:
        copies = [tensor.clone() for tensor in sent]
        number = self._give(f"{what} {', '.join(str(p) for p in params)}", copies)
        self._flying[number] = sent, copies
        return _Pending(number, params)

    def _finish(self, pending: _Pending) -> list[list[Tensor]]:
        by_rank = self.group.take(pending.number)
        sent, copies = self._flying.pop(pending.number)
        changed = [p.name for p, a, b in zip(pending.params, sent, copies, strict=True) if not torch.equal(a, b)]
        assert not changed, f"{changed} changed while they were sent"
        return by_rank

    def _give(self, name: str, value: Any) -> int:
        number, self._begun = self._begun, self._begun + 1
        self.group.give(self.rank, number, name, value)
        return number
