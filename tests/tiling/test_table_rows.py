"""Where rows lie that a lookup asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.core.layout import Layout
from zerograph.core.plan import tile_params
from zerograph.core.step import Param
from zerograph.graph.ops import VIEW
from zerograph.tiling.table_rows import TableRows, checked


class Viewed(fx.Interpreter):
    """Runs a graph with views of tiles."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A view is a slice."""
        if target is VIEW:
            source, dim, begin, end = args
            return source.narrow(dim, begin, end - begin)
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tiles", [2, 3])
def test_each_row_is_in_one_tile_at_its_place(ranks: int, tiles: int) -> None:
    rows = 11
    table = Param("table", (rows, 4), "float32", "float32", "float32", True, Layout("rows", ranks))
    chunk = table.chunk
    b = Builder(ranks)
    ids = b.input("ids", rows, dtype=torch.int64)
    found = TableRows(b.graph, ids, chunk, ids)
    params = tile_params(table, tiles)
    gm = b.output(*(node for param in params for node in found.in_tile(param)))
    results = iter(Viewed(gm).run(torch.arange(rows)))
    seen = torch.zeros(rows, dtype=torch.int64)
    for param in params:
        # What a gathered tile holds: of each rank the same rows of its shard.
        held = [rank * chunk + row for rank in range(ranks) for row in range(param.begin, param.end)]
        inside, where = next(results), next(results)
        for row in torch.arange(rows)[inside.squeeze(-1)].tolist():
            assert held[where[row]] == row
        seen += inside.squeeze(-1)
    assert seen.tolist() == [1] * rows


def test_an_index_that_is_no_row_is_an_error() -> None:
    b = Builder()
    ids = b.input("ids", 2, 3, dtype=torch.int64)
    gm = b.output(checked(b.graph, ids, 7, ids))
    valid = torch.tensor([[0, 6, 3], [1, 1, 2]])
    (same,) = fx.Interpreter(gm).run(valid)
    assert torch.equal(same, valid)
    for wrong in (7, -1):
        with pytest.raises(IndexError, match="index out of range"):
            fx.Interpreter(gm).run(torch.full((2, 3), wrong))
