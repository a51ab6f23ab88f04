"""Which parameters can be used in tiles."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.tiling.products import is_gradient_of_lookup, is_product, other_than_rows, parts_of, tilable

aten, prims = torch.ops.aten, torch.ops.prims


def _turned(b: Builder, node: fx.Node) -> fx.Node:
    return b.call(aten.permute.default, node, [1, 0])


@pytest.mark.parametrize(
    ("use", "can"),
    [
        (lambda b, x, w: b.mm(x, _turned(b, w)), True),
        (lambda b, x, w: b.call(aten.addmm.default, b.input("bias", 4), x, _turned(b, w)), True),
        (lambda b, x, w: b.mm(x, _turned(b, _turned(b, w))), True),  # as the backward does
        (lambda b, x, w: b.mm(x, b.call(aten.view.default, w, [4, 4])), True),
        (lambda b, x, w: b.mm(b.mm(x, w), _turned(b, w)), True),
        (lambda b, x, w: b.call(aten.addmm.default, b.input("bias", 4), x, w), True),  # rows that are inputs
        (lambda b, x, w: b.mm(w, x), False),
        (lambda b, x, w: b.mm(_turned(b, w), x), False),
        (lambda b, x, w: b.mm(w, _turned(b, w)), False),
        (lambda b, x, w: b.mm(x, _turned(b, b.call(prims.convert_element_type.default, w, torch.float32))), True),
        (lambda b, x, w: b.call(aten.addmm.default, w, x, _turned(b, w)), False),
        (lambda b, x, w: b.call(aten.addmm.default, x, x, _turned(b, w)), False),  # a bias for each token
        (lambda b, x, w: b.call(aten.addmm.default, x, x, w), False),
        (lambda b, x, w: b.mm(x, _turned(b, b.call(aten.abs.default, w))), False),
        (lambda b, x, w: b.call(aten.embedding.default, w, b.input("i", 3, dtype=torch.int64)), True),
        (lambda b, x, w: b.call(aten.embedding.default, _turned(b, w), b.input("i", 3, dtype=torch.int64)), False),
        (lambda b, x, w: b.call(aten.index.Tensor, w, [b.input("i", 3, dtype=torch.int64)]), False),
    ],
)
def test_what_products_and_lookups_alone_use(use, can: bool) -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    gm = b.output(use(b, x, w))
    assert list(tilable(gm.graph)) == ["w"] * can


def test_one_use_that_needs_it_untiled_is_enough() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    w, v = b.params("w", "v")
    gm = b.output(b.mm(x, _turned(b, w)), b.mm(x, _turned(b, v)), b.call(aten.sum.default, w))
    assert list(tilable(gm.graph)) == ["v"]


def test_gradients_are_products_and_their_sums() -> None:
    b = Builder()
    x, grad = b.input("x", 4, 4), b.input("grad", 4, 4)
    u, v, w = b.params("u", "v", "w")
    product = b.mm(_turned(b, grad), x)
    both = b.call(aten.add.Tensor, product, _turned(b, b.mm(_turned(b, x), grad)))
    scaled = b.call(aten.mul.Tensor, product, 2.0)
    cast = b.call(torch.ops.prims.convert_element_type.default, both, torch.float64)
    outputs = [b.reduce_grad(n, p) for n, p in ((product, u), (cast, v), (scaled, w))]
    gm = b.output(*outputs, *(b.mm(grad, p) for p in (u, v, w)))
    assert list(tilable(gm.graph)) == ["u", "v"]


def test_unsharded_parameters_have_no_tiles() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w", sharded=False)
    assert list(tilable(b.output(b.mm(x, _turned(b, w))).graph)) == []


def test_a_column_times_a_row_is_a_product() -> None:
    b = Builder()
    column, row = b.input("column", 4, 1), b.input("row", 1, 4)
    assert is_product(b.call(aten.mul.Tensor, column, row))
    assert not is_product(b.call(aten.mul.Tensor, row, column))


def test_gradients_of_lookups_are_sums_of_rows_among_zeros() -> None:
    b = Builder()
    ids, rows = b.input("ids", 3, dtype=torch.int64), b.input("rows", 3, 4)
    mask, zeros = b.input("mask", 3, 1, dtype=torch.bool), b.call(aten.full.default, [4, 4], 0)
    (w,) = b.params("w")
    placed = aten._unsafe_masked_index_put_accumulate.default
    sums = [b.call(placed, into, mask, [ids], rows) for into in (zeros, b.input("ones", 4, 4))]
    assert [is_gradient_of_lookup(node) for node in sums] == [True, False]
    gm = b.output(b.call(aten.embedding.default, w, ids), b.reduce_grad(sums[0], w))
    assert list(tilable(gm.graph)) == ["w"]


def test_a_gradient_of_a_thousand_terms() -> None:
    """As of a weight that a thousand layers share."""
    b = Builder()
    dy, x = b.input("dy", 4, 3), b.input("x", 3, 4)
    total = b.mm(dy, x)
    for _ in range(1000):
        total = b.call(aten.add.Tensor, _turned(b, _turned(b, total)), b.mm(dy, x))
    parts = list(parts_of(total))
    assert [part.node for part in parts] == list(b.graph.nodes)[2:] and parts[-1].node is total
    assert sum(not part.sources for part in parts) == 1001 and other_than_rows(total) is None
    other = b.call(aten.exp.default, total)
    assert other_than_rows(b.call(aten.add.Tensor, total, other)) is other
