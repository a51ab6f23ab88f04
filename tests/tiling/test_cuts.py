"""How operators treat dimensions that are cut: each keeps them, sums over them, or mixes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Builder

from zerograph.tiling.cuts import COLUMNS, ROWS, Cut, Mixes, cut_of_operand, cut_of_result

aten = torch.ops.aten


def test_dimensions_of_a_part() -> None:
    assert Cut((0, 1)).of_part([3, 4, 64], 5) == [1, 5, 64]
    assert Cut((0, 2)).of_part([3, 64, 4], 5) == [1, 64, 5]
    assert Cut((0, 2, 3)).runs() == [(0, 1), (2, 4)] and ROWS.runs() == [(0, 1)]
    assert Cut((0, 2)).moved(1) == Cut((1, 3)) and Cut((0, 2)).sizes([3, 64, 4]) == (3, 4)


@pytest.mark.parametrize("target", [aten.mm.default, aten.addmm.default])
def test_a_product_keeps_one_dimension_of_each_factor_and_sums_over_the_other(target: Any) -> None:
    b = Builder()
    left, right, bias = b.input("left", 4, 8), b.input("right", 8, 6), b.input("bias", 6)
    product = b.call(target, *[bias] * (target is aten.addmm.default), left, right)
    assert [cut_of_result(product, left, cut) for cut in (ROWS, COLUMNS)] == [ROWS, None]
    assert [cut_of_result(product, right, cut) for cut in (ROWS, COLUMNS)] == [None, COLUMNS]
    assert [cut_of_operand(product, left, cut) for cut in (ROWS, COLUMNS, None)] == [ROWS, None, COLUMNS]
    assert [cut_of_operand(product, right, cut) for cut in (ROWS, COLUMNS, None)] == [None, COLUMNS, ROWS]
    if bias in product.args:
        assert cut_of_result(product, bias, ROWS) == COLUMNS and cut_of_operand(product, bias, COLUMNS) == ROWS
        assert cut_of_operand(product, bias, ROWS) is None and cut_of_operand(product, bias, None) is None


def test_a_square_and_a_scaled_product_mix() -> None:
    b = Builder()
    x, y, bias = b.input("x", 4, 4), b.input("y", 4, 4), b.input("bias", 4)
    scaled = b.call(aten.addmm.default, bias, x, y)
    scaled.kwargs = {"alpha": 2}
    for node in (b.call(aten.mm.default, x, x), scaled):
        with pytest.raises(Mixes, match="is not known to treat"):
            cut_of_result(node, x, ROWS)


@pytest.mark.parametrize(
    ("target", "args", "cut", "found"),
    [
        (aten.relu.default, (), (0, 1), (0, 1)),
        (aten.permute.default, ([0, 2, 1],), (0,), (0,)),
        (aten.permute.default, ([0, 2, 1],), (1,), (2,)),
        (aten.unsqueeze.default, (1,), (0, 1), (0, 2)),
        (aten.view.default, ([12, 5],), (0, 1), (0,)),
        (aten.view.default, ([3, 2, 2, 5],), (1,), (1, 2)),
        (aten.sum.dim_IntList, ([2],), (0, 1), (0, 1)),
        (aten.sum.dim_IntList, ([0, 1],), (0, 1), None),
        (aten.amax.default, ([-1], True), (1,), (1,)),
    ],
)
def test_what_is_kept_and_back(target: Any, args: tuple[Any, ...], cut: tuple[int, ...], found: Any) -> None:
    b = Builder()
    x = b.input("x", 3, 4, 5)
    node = b.call(target, x, *args)
    result = cut_of_result(node, x, Cut(cut))
    assert result == (None if found is None else Cut(found))
    if result is not None and target not in (aten.sum.dim_IntList, aten.amax.default):
        assert cut_of_operand(node, x, result) == Cut(cut)


@pytest.mark.parametrize(
    ("target", "args", "cut"),
    [
        (aten.permute.default, ([1, 0, 2],), (0, 1)),
        (aten.view.default, ([4, 3, 5],), (0,)),
        (aten.amax.default, ([0],), (0,)),
        (aten.sum.dim_IntList, ([0],), (0, 1)),
        (aten._softmax.default, (-1, False), (0,)),
        (aten.flip.default, ([0],), (0,)),
    ],
)
def test_what_mixes(target: Any, args: tuple[Any, ...], cut: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input("x", 3, 4, 5)
    with pytest.raises(Mixes):
        cut_of_result(b.call(target, x, *args), x, Cut(cut))
