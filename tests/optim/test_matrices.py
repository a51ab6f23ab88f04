"""Matrices come whole to owners with equal work, and their rows back to the ranks, in rounds of a bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from thread_ranks import ThreadCommunicator, ThreadGroup
from torch import Tensor

from zerograph.core.errors import CollectiveMismatch
from zerograph.core.layout import rows_of
from zerograph.optim import matrices
from zerograph.optim.matrices import SENT, SplitMatrix, here, on_owners, owned


def _described(shape: tuple[int, int], cost: int = 1, name: str = "") -> SplitMatrix:
    return SplitMatrix(name, shape, cost, lambda: torch.empty(0), lambda rows: None)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
@settings(max_examples=examples(200), deadline=None)
def test_no_owner_has_more_than_its_share_and_one_matrix(costs: list[int], ranks: int) -> None:
    found = owned([_described((1, 1), cost, str(i)) for i, cost in enumerate(costs)], ranks)
    assert sorted(m.name for own in found for m in own) == sorted(map(str, range(len(costs))))
    work = [sum(m.cost for m in own) for own in found]
    assert max(work) <= sum(costs) / ranks + max(costs, default=0)


def test_matrices_of_one_shape_are_shared_out() -> None:
    found = owned([_described(shape, prod(shape)) for shape in [(8, 8), (4, 4)] * 4], 4)
    assert [[m.shape for m in own] for own in found] == [[(8, 8), (4, 4)]] * 4


SHAPES = [(8, 3), (5, 4), (8, 3), (9, 2), (4, 6), (6, 5), (8, 3)]


def _whole(index: int) -> Tensor:
    return torch.arange(prod(SHAPES[index]), dtype=SENT).view(SHAPES[index]) + index


def _exchanged(comm: ThreadCommunicator) -> list[int]:
    """How many matrices this rank computed at once; each gets its largest element subtracted, which is of one rank."""
    given, results, batches = list[SplitMatrix](), dict[int, Tensor](), list[int]()
    for index, shape in enumerate(SHAPES):
        rows = rows_of(shape[0], comm.rank, comm.world_size)
        own = _whole(index)[rows]
        given.append(
            SplitMatrix(str(index), shape, prod(shape), lambda own=own: own, lambda r, i=index: results.update({i: r}))
        )

    def compute(whole: Sequence[Tensor]) -> list[Tensor]:
        batches.append(len(whole))
        return [matrix - matrix.max() for matrix in whole]

    on_owners(given, comm, "update", compute)  # type: ignore[arg-type]
    for index, shape in enumerate(SHAPES):
        expected = _whole(index) - _whole(index).max()
        assert torch.equal(results[index], expected[rows_of(shape[0], comm.rank, comm.world_size)])
    return batches


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 100, 2**20])
def test_rows_come_back_to_where_they_came_from(world: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With five ranks some have no rows of a matrix; with a size of 1 each matrix is a round."""
    monkeypatch.setattr(matrices, "AT_ONCE", size)
    group = ThreadGroup(world)
    found = group.run(_exchanged, group.ranks)
    assert sum(map(sum, found)) == len(SHAPES)
    assert all(batches == [1] * len(batches) for batches in found) or size > 1
    assert all(len(batches) == 1 for batches in found) or size < 2**20


def test_ranks_with_other_matrices_are_told() -> None:
    group = ThreadGroup(2)
    with pytest.raises(CollectiveMismatch):
        group.run(lambda comm: on_owners([_described((4, 2 + comm.rank))], comm, "update", lambda _: ()), group.ranks)


def test_one_rank_computes_what_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "AT_ONCE", 100)
    found, batches = dict[int, Tensor](), list[list[tuple[int, ...]]]()
    given = [
        SplitMatrix("", shape, 1, lambda i=i: _whole(i), lambda rows, i=i: found.update({i: rows}))
        for i, shape in enumerate(SHAPES)
    ]

    def compute(whole: Sequence[Tensor]) -> list[Tensor]:
        batches.append([tuple(matrix.shape) for matrix in whole])
        return [-matrix for matrix in whole]

    here(given, compute)
    assert all(torch.equal(found[i], -_whole(i)) for i in range(len(SHAPES)))
    assert [(8, 3), (8, 3)] in batches  # 48 bytes each
