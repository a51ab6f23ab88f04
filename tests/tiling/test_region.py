"""A region grows through what it makes, is refused what mixes, and is copied for a part."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.tiling.cuts import COLUMNS, ROWS, Cut, Mixes
from zerograph.tiling.region import Growth, Region, copy_of_tile

aten = torch.ops.aten


class _Everything(Growth):
    """Takes in all that is computed."""

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        return source.op == "call_function"


class _Nothing(Growth):
    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        return False


def grown(node: fx.Node, cut: Cut | None, count: int = 4) -> Region:
    growth = _Everything(node, Region(count=count, large=0), lambda _: True)
    growth.enter(node, cut)
    return growth.region


def test_a_region_is_copied_for_a_part() -> None:
    """A product that sums stands for its factors, what is cut outside is asked for, and constants are made anew."""
    b = Builder()
    x, w = b.input("x", 4, 8), b.input("w", 8, 6)
    wide = b.call(aten.relu.default, b.call(aten.mm.default, x, w))
    kept = b.call(aten.mul.Tensor, wide, b.call(aten.full.default, [1], 2))
    total = b.call(aten.mm.default, kept, v := b.input("v", 6, 4))
    region = grown(total, None, count=6)
    assert region.cuts[total] is None and region.cuts[wide] == COLUMNS
    assert {source: cut for (_, source), cut in region.given.items()} == {w: COLUMNS, v: ROWS}

    part = {
        (source, cut): b.input(f"{source.name}_part", *shape)
        for source, cut, shape in ((w, COLUMNS, (8, 2)), (v, ROWS, (2, 4)))
    }

    def insert(node: fx.Node, args: tuple[object, ...], named: dict[str, object]) -> fx.Node:
        assert not named
        return b.call(node.target, *args)  # type: ignore[arg-type]

    copies = copy_of_tile(region, 2, part, insert)
    left, right = copies[total]
    assert right is part[v, ROWS] and left is copies[kept][0] and list(left.meta["val"].shape) == [4, 2]
    constant = left.args[1]
    assert isinstance(constant, fx.Node) and constant is not kept.args[1] and constant.target is aten.full.default


def test_a_constant_that_is_cut_in_one_place_is_whole_in_another() -> None:
    b = Builder()
    x, numbers = b.input("x", 4, 4), b.call(aten.arange.start_step, 0, 4, 1)
    by_word = b.call(aten.mul.Tensor, x, numbers)
    by_token = b.call(aten.mul.Tensor, b.call(aten.sum.dim_IntList, by_word, [1]), numbers)
    growth = _Nothing(by_word, region := Region(count=4, large=0), lambda _: True)
    for node, behind in ((by_word, None), (by_token.args[0], by_word), (by_token, by_token.args[0])):
        growth.enter(node, ROWS, behind)
    assert region.given == {(by_word, x): ROWS, (by_token, numbers): ROWS}
    part = {(x, ROWS): b.input("x_part", 2, 4), (numbers, ROWS): b.input("numbers_part", 2)}

    def insert(node: fx.Node, args: tuple[object, ...], named: dict[str, object]) -> fx.Node:
        assert not named
        return b.call(node.target, *args)  # type: ignore[arg-type]

    copies = copy_of_tile(region, 2, part, insert)
    cut = part[numbers, ROWS]
    assert copies[by_token][0].args[1] is cut and copies[by_word][0].args[1] not in (numbers, cut)


def test_random_numbers_and_unknown_places_are_refused() -> None:
    b = Builder()
    x = b.input("x", 4, 8)
    for node, why in (
        (b.call(aten.mul.Tensor, x, b.call(aten.bernoulli.default, x)), "random"),
        (b.call(aten.slice.Tensor, x, 1, b.call(aten.sym_size.int, x, 0)), "slices at places"),
    ):
        with pytest.raises(Mixes, match=why):
            grown(node, ROWS)
