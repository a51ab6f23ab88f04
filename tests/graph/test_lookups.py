"""Which rows of a table positions reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from zerograph.graph.lookups import last_of_range

RANGES: list[tuple[str, Any, int | None]] = [
    ("upwards", torch.arange, 11),
    ("shifted, for each of a batch", lambda n: (torch.arange(n) + 2).unsqueeze(0).expand(3, n), 13),
    ("in steps", lambda n: torch.arange(0, 2 * n, 2), 22),
    ("downwards", lambda n: torch.arange(n - 1, -1, -1), None),
    ("half of it", lambda n: torch.arange(2 * n)[:n], None),
    ("one of its parts", lambda n: torch.arange(2 * n).chunk(2)[0], None),
]


@pytest.mark.parametrize(("make", "last"), [r[1:] for r in RANGES], ids=[r[0] for r in RANGES])
def test_the_last_index_is_known_where_all_of_a_rising_range_is_read(make: Any, last: int | None) -> None:
    def positions(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(make(tokens.shape[0]), table)

    decompositions = get_decompositions([torch.ops.aten.arange.start_step, torch.ops.aten.arange.default])
    gm = make_fx(positions, decomposition_table=decompositions)(torch.zeros(64, 4), torch.zeros(12))
    (lookup,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert last_of_range(lookup.args[1]) == last
