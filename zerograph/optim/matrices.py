"""Matrices that are split by rows over ranks, each brought whole to one rank, its owner, and back by all-to-all.

Owners have about the same work. Messages are cut into rounds, so that the memory for whole matrices is bounded; while
owners work on one round, the rows of the next one are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from zerograph.core.layout import rows_of
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, sequence_of

AT_ONCE = 128 * 2**20
"""Bytes of whole matrices that an owner has at once, or one matrix."""

SENT = torch.bfloat16
"""The dtype of messages: that of the computation, so that nothing is rounded twice."""


@dataclass(frozen=True, slots=True)
class SplitMatrix:
    """A matrix of which each rank has rows.

    Attributes:
        name: for the comparison of ranks.
        shape: of the whole.
        cost: of the computation on the whole.
        rows: makes this rank's rows in :data:`SENT`, where the computation is.
        put: takes this rank's rows of the result.
    """

    name: str
    shape: tuple[int, int]
    cost: int
    rows: Callable[[], Tensor]
    put: Callable[[Tensor], None]

    @property
    def size(self) -> int:
        """Bytes of the whole in :data:`SENT`."""
        return prod(self.shape) * SENT.itemsize

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """The shape of a rank's rows."""
        rows = rows_of(self.shape[0], rank, ranks)
        return rows.stop - rows.start, self.shape[1]


Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Computes a matrix of the same shape from each of some whole ones."""


def here(matrices: Sequence[SplitMatrix], compute: Compute) -> None:
    """Let this rank, which has all rows of each of ``matrices``, ``compute`` all of them."""
    for chunk in _chunks(_by_shape(matrices)):
        for matrix, result in zip(chunk, compute([m.rows() for m in chunk]), strict=True):
            matrix.put(result)


def on_owners(matrices: Sequence[SplitMatrix], comm: Communicator, program: str, compute: Compute) -> None:
    """Let the owner of each of ``matrices`` ``compute`` it; all ranks call this with the same ones, in one order.

    Raises:
        CollectiveMismatch: ranks have different ones.
        RankError: another rank failed.
    """
    names = [f"{m.name} {m.shape}" for m in matrices]
    with together(comm, Entry(program, sequence_of(names), comm.steps)):
        _Exchanges(comm, matrices).run(compute)


def owned(matrices: Sequence[SplitMatrix], ranks: int) -> list[list[SplitMatrix]]:
    """The matrices of each owner: each in turn, the most costly first, goes to the one with the least work so far."""
    found, work = [list[SplitMatrix]() for _ in range(ranks)], [0] * ranks
    for matrix in sorted(matrices, key=lambda m: -m.cost):  # equal ones as they stand: the same on all ranks
        least = work.index(min(work))
        found[least].append(matrix)
        work[least] += matrix.cost
    return found


def _by_shape(matrices: Iterable[SplitMatrix]) -> list[SplitMatrix]:
    """Those of one shape one behind another, to be computed in one batch."""
    return sorted(matrices, key=lambda m: m.shape)


def _chunks(matrices: Iterable[SplitMatrix]) -> Iterator[list[SplitMatrix]]:
    chunk, size = list[SplitMatrix](), 0
    for matrix in matrices:
        if chunk and size + matrix.size > AT_ONCE:
            yield chunk
            chunk, size = [], 0
        chunk.append(matrix)
        size += matrix.size
    if chunk:
        yield chunk


class _Exchanges:
    """The messages of one update."""

    def __init__(self, comm: Communicator, matrices: Sequence[SplitMatrix]) -> None:
        self._comm, self._rank, self._ranks = comm, comm.rank, comm.world_size
        chunks = [list(_chunks(_by_shape(own))) for own in owned(matrices, self._ranks)]
        count = max(map(len, chunks))
        # Of each round the matrices by owner; at the end some owners have none left.
        self._rounds = [[own[i] if i < len(own) else [] for own in chunks] for i in range(count)]

    def run(self, compute: Compute) -> None:
        """Bring the rows of each round to their owners, and what these ``compute`` back."""
        coming = self._send(0)
        returning: Any = None
        for number, by_owner in enumerate(self._rounds):
            whole = self._whole(by_owner[self._rank], self._comm.finish_exchange(coming))
            if number + 1 < len(self._rounds):
                coming = self._send(number + 1)
            results = compute(whole) if whole else ()
            begun = self._send_back(number, results)
            if number:
                self._put(number - 1, self._comm.finish_exchange(returning))
            returning = begun
        self._put(len(self._rounds) - 1, self._comm.finish_exchange(returning))

    def _send(self, number: int) -> Any:
        by_owner = self._rounds[number]
        sends = [_message([matrix.rows() for matrix in own]) for own in by_owner]
        return self._comm.start_exchange(sends, self._sizes(number))

    def _sizes(self, number: int) -> list[list[int]]:
        """Bytes of each rank's message to each owner in a round."""
        return [
            [sum(prod(m.part(rank, self._ranks)) for m in own) * SENT.itemsize for own in self._rounds[number]]
            for rank in range(self._ranks)
        ]

    def _whole(self, own: Sequence[SplitMatrix], messages: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank owns, from the rows of all ranks."""
        parts = [self._split(own, message, rank) for rank, message in enumerate(messages)]
        return [torch.cat(rows) for rows in zip(*parts, strict=True)] if own else []

    def _send_back(self, number: int, results: Sequence[Tensor]) -> Any:
        rows = [[r[rows_of(r.shape[0], rank, self._ranks)] for r in results] for rank in range(self._ranks)]
        sizes = [list(column) for column in zip(*self._sizes(number), strict=True)]
        return self._comm.start_exchange([_message(own) for own in rows], sizes)

    def _put(self, number: int, messages: Sequence[Tensor]) -> None:
        for own, message in zip(self._rounds[number], messages, strict=True):
            for matrix, rows in zip(own, self._split(own, message, self._rank), strict=True):
                matrix.put(rows)

    def _split(self, own: Sequence[SplitMatrix], message: Tensor, rank: int) -> list[Tensor]:
        """The rows of a rank in a message about the matrices of one owner."""
        shapes = [matrix.part(rank, self._ranks) for matrix in own]
        parts = message.view(SENT).split([prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _message(rows: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([r.reshape(-1) for r in rows]) if rows else torch.empty(0, dtype=SENT)
    return flat.view(torch.uint8)
