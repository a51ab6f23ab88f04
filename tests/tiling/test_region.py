"""A region grows through what it makes, is refused what mixes, and is copied for a part."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.tiling.cuts import COLUMNS, ROWS, Cut, Mixes
from zerograph.tiling.region import Growth, Region, copies_of

aten = torch.ops.aten


class _Everything(Growth):
    """Takes in all that is computed."""

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        return source.op == "call_function"


def grown(node: fx.Node, cut: Cut | None) -> Region:
    growth = _Everything(Region(), lambda _: True)
    growth.enter(node, cut)
    return growth.region


def test_a_region_is_copied_for_a_part() -> None:
    """A product that sums stands for its factors, what is cut outside is asked for, and constants are made anew."""
    b = Builder()
    x, w = b.input("x", 4, 8), b.input("w", 8, 6)
    wide = b.call(aten.relu.default, b.call(aten.mm.default, x, w))
    kept = b.call(aten.mul.Tensor, wide, b.call(aten.full.default, [1], 2))
    total = b.call(aten.mm.default, kept, v := b.input("v", 6, 4))
    region = grown(total, None)
    assert region.cuts[total] is None and region.cuts[wide] == COLUMNS
    assert {source: cut for (_, source), cut in region.given.items()} == {w: COLUMNS, v: ROWS}

    part = {source: b.input(f"{source.name}_part", *shape) for source, shape in ((w, (8, 2)), (v, (2, 4)))}

    def insert(node: fx.Node, args: tuple[object, ...]) -> fx.Node:
        return b.call(node.target, *args)  # type: ignore[arg-type]

    copies = dict(copies_of(region, region.nodes, 2, lambda _, source: part.get(source), insert))
    left, right = copies[total]
    assert right is part[v] and left is copies[kept][0] and list(left.meta["val"].shape) == [4, 2]
    constant = left.args[1]
    assert isinstance(constant, fx.Node) and constant is not kept.args[1] and constant.target is aten.full.default


def test_random_numbers_and_unknown_places_are_refused() -> None:
    b = Builder()
    x = b.input("x", 4, 8)
    for node, why in (
        (b.call(aten.mul.Tensor, x, b.call(aten.bernoulli.default, x)), "random"),
        (b.call(aten.slice.Tensor, x, 1, b.call(aten.sym_size.int, x, 0)), "slices at places"),
    ):
        with pytest.raises(Mixes, match=why):
            grown(node, ROWS)
