"""The windows that slices keep of tokens."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.tiling.cuts import ROWS, Cut, is_slice_of, is_zeros
from zerograph.tiling.windows import Window, window_of, zero_outside

aten = torch.ops.aten
BOTH = Cut((0, 1))


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ((1, 0, -1), Window((3, 4), 1, 0, 3, 1)),
        ((-2, 1), Window((3, 4), 1, 1, 4, 1)),
        ((0, None, 2), Window((3, 4), 0, 0, 2, 1)),
        ((1, 0, 4, 2), Window((3, 4), 1, 0, 4, 2)),
        ((1, 0, 2**63 - 1), None),
        ((2, 0, 5), None),
    ],
)
def test_windows_of_slices(args: tuple[int, ...], wanted: Window | None) -> None:
    b = Builder()
    node = b.call(aten.slice.Tensor, b.input("x", 3, 4, 64), *args)
    assert window_of(node, BOTH) == wanted
    assert is_slice_of(node, BOTH) is (args[0] != 2)
    if wanted is not None:
        val = node.meta["val"]
        assert wanted.kept == tuple(val.shape[:2]) and wanted.count == val.shape[0] * val.shape[1] < wanted.all == 12
        written = b.call(aten.slice_scatter.default, b.input("base", 3, 4, 64), node, *args)
        assert window_of(written, BOTH) == wanted


def test_what_is_linear_in_zeros_is_zero() -> None:
    b = Builder()
    zeros, part, x = b.call(aten.full.default, [4, 8], 0), b.input("part", 3, 8), b.input("x", 4, 8)
    written = b.call(aten.slice_scatter.default, zeros, part, 0, 0, 3)
    inside: dict[fx.Node, Cut | None] = {written: ROWS}

    def zero(target: torch._ops.OpOverload, *args: object, tokens: Cut | None = ROWS) -> bool:
        node = b.call(target, *args)
        inside[node] = tokens
        return node in zero_outside(inside)

    assert is_zeros(zeros) and not is_zeros(x) and written in zero_outside(inside)
    assert zero(aten.mul.Tensor, x, written) and zero(aten.div.Tensor, written, x) and zero(aten.neg.default, written)
    turned = b.call(aten.permute.default, written, [1, 0])
    inside[turned] = Cut((1,))
    assert zero(aten.mm.default, turned, x, tokens=None) and zero(aten.sum.dim_IntList, written, [0], tokens=None)
    assert zero(aten.add.Tensor, written, written) and zero(aten.constant_pad_nd.default, written, [0, 1])
    assert not zero(aten.constant_pad_nd.default, written, [0, 1], 1.0)
    assert not zero(aten.add.Tensor, written, x) and not zero(aten.add.Tensor, written, 1)
    assert not zero(aten.div.Tensor, x, written) and not zero(aten.exp.default, written)
    among = b.call(aten.slice_scatter.default, x, part, 0, 0, 3)
    inside[among] = ROWS
    assert among not in zero_outside(inside)


def test_zeros_are_followed_through_a_thousand_operators() -> None:
    b = Builder()
    zeros, part = b.call(aten.full.default, [4, 8], 0), b.input("part", 3, 8)
    node = b.call(aten.slice_scatter.default, zeros, part, 0, 0, 3)
    inside: dict[fx.Node, Cut | None] = {node: ROWS}
    for _ in range(1000):
        node = b.call(aten.add.Tensor, node, node)
        inside[node] = ROWS
    assert zero_outside(inside) == inside.keys()
