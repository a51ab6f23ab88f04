"""The cost of operations is the sum of that of each."""

from __future__ import annotations

from zerograph.core.cost import Cost
from zerograph.core.program import Segment
from zerograph.core.step import Op


def test_operations_segments_and_costs_add_up() -> None:
    op = Op("dot", "aten.mm", "forward", (), ("dot",), flops=5, moved=7, packed=3)
    segment = Segment("", 1, flops=10, moved=20, packed=2, attention=8)
    assert Cost.of(op, segment, Cost(moved=100)) == Cost(flops=15, moved=127, packed=5, attention=8)
    assert Cost.of() == Cost(0, 0, 0, 0)


def test_a_share_of_it_is_of_all_its_numbers() -> None:
    assert Cost(9, 20, 4, 8).of_share(2) == Cost(4, 10, 2, 4)
