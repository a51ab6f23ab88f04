"""How operators treat dimensions that are cut: each keeps them, sums over them, or mixes them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from graphs import Builder

from zerograph.tiling.cuts import COLUMNS, ROWS, Cut, Mixes, cut_of_operand, cut_of_result

aten, prims = torch.ops.aten, torch.ops.prims


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
    ("shape", "target", "args", "cut", "found"),
    [
        ((4, 3, 8), aten.view.default, ([12, 8],), 0, 0),
        ((12, 8), aten.view.default, ([4, 3, 8],), 0, 0),
        ((12, 8), aten.view.default, ([1, 4, 24],), 0, 1),
        ((4, 2, 3, 5), aten.view.default, ([8, 3, 5],), 0, 0),
        ((2, 4, 3), aten.permute.default, ([1, 0, 2],), 1, 0),
        ((4, 3, 8), aten.select.int, (1, 2), 0, 0),
        ((3, 4, 8), aten.select.int, (0, 2), 1, 0),
        ((4, 3, 8), aten.sum.dim_IntList, ([1],), 0, 0),
        ((3, 4, 8), aten.amax.default, ([0],), 1, 0),
        ((4, 1, 8), aten.expand.default, ([4, 3, 8],), 0, 0),
        ((4, 3, 8), aten.slice.Tensor, (2, 0, 3), 0, 0),
        ((4, 3, 8), aten.permute.default, ([-3, -1, -2],), 0, 0),
        ((4, 3, 8), prims.rev.default, ([1],), 0, 0),
        ((4, 3, 8), aten.cumsum.default, (-1,), 0, 0),
        ((4, 3, 8), aten.constant_pad_nd.default, ([0, 1, 2, 0],), 0, 0),
        ((4, 3, 8), aten.repeat.default, ([1, 2, 1],), 0, 0),
    ],
)
def test_samples_are_kept_and_back(
    shape: tuple[int, ...], target: Any, args: tuple[Any, ...], cut: int, found: int
) -> None:
    """Of four samples, each with several places of the dimension."""
    b = Builder()
    x = b.input("x", *shape)
    node = b.call(target, x, *args)
    assert cut_of_result(node, x, Cut((cut,), 4)) == Cut((found,), 4)
    assert cut_of_operand(node, x, Cut((found,), 4)) == Cut((cut,), 4)


@pytest.mark.parametrize(
    ("shape", "target", "args"),
    [
        ((4, 6), aten.view.default, ([3, 8],)),  # rows of several samples
        ((4, 3), aten.select.int, (0, 1)),
        ((4, 3), aten.cumsum.default, (0,)),
        ((4, 3), prims.rev.default, ([0],)),
        ((4, 3), aten.constant_pad_nd.default, ([0, 0, 1, 0],)),
        ((4, 3), aten.repeat.default, ([2, 1],)),
    ],
)
def test_what_mixes_samples(shape: tuple[int, ...], target: Any, args: tuple[Any, ...]) -> None:
    b = Builder()
    x = b.input("x", *shape)
    with pytest.raises(Mixes):
        cut_of_result(b.call(target, x, *args), x, Cut((0,), 4))


@pytest.mark.parametrize(("over", "cut"), [([0], (0,)), ([0], (0, 1)), ([], (1,))])
def test_a_sum_that_stays_as_a_dimension_of_1_is_of_several(over: list[int], cut: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input("x", 3, 4, 5)
    with pytest.raises(Mixes, match="makes one number of several tokens"):
        cut_of_operand(b.call(aten.sum.dim_IntList, x, over, True), x, Cut(cut))


def test_places_of_a_sample() -> None:
    b = Builder()
    rows = b.input("rows", 12, 8)
    assert Cut((0,), 4).places(rows) == 3 and ROWS.places(rows) == 1
    assert Cut((0,), 4).at((1,)) == Cut((1,), 4) and Cut((0,), 4).moved(1) == Cut((1,), 4)


def test_a_product_of_pairs_keeps_their_number() -> None:
    b = Builder()
    left, right = b.input("left", 8, 2, 3), b.input("right", 8, 3, 5)
    product = b.call(aten.bmm.default, left, right)
    assert cut_of_result(product, left, Cut((0,), 4)) == cut_of_operand(product, right, Cut((0,), 4)) == Cut((0,), 4)
    with pytest.raises(Mixes):
        cut_of_result(product, left, Cut((1,), 2))
    for bias in (b.input("bias", 5), b.input("one", 1, 2, 5)):
        added = b.call(aten.baddbmm.default, bias, left, right)
        assert cut_of_operand(added, bias, Cut((0,), 4)) is None


def test_of_several_tensors_each_has_the_samples_and_lacks_what_is_unbound() -> None:
    b = Builder()
    x = b.input("x", 3, 4, 5)
    node = b.call(aten.unbind.int, x, 0)
    assert cut_of_result(node, x, Cut((1,), 4)) == Cut((0,), 4)
    assert cut_of_operand(node, x, Cut((0,), 4)) == Cut((1,), 4)
    with pytest.raises(Mixes, match="makes several tensors"):
        cut_of_result(node, x, Cut((0,), 3))


def test_a_variance_without_dimensions_is_over_all_of_them() -> None:
    b = Builder()
    x = b.input("x", 3, 4, 5)
    over_all, over_last = b.call(aten.var_mean.correction, x), b.call(aten.var_mean.correction, x, [2])
    for node in (over_all, over_last):
        node.kwargs = {"keepdim": True}
    assert cut_of_result(over_last, x, Cut((0, 1))) == cut_of_operand(over_last, x, Cut((0, 1))) == Cut((0, 1))
    for find in (cut_of_result, cut_of_operand):
        with pytest.raises(Mixes, match="makes several tensors"):
            find(over_all, x, Cut((1,)))


def test_one_place_is_written_where_it_is_taken() -> None:
    b = Builder()
    x, part = b.input("x", 3, 4, 5), b.input("part", 4, 5)
    node = b.call(aten.select_scatter.default, x, part, 0, 1)
    assert cut_of_result(node, x, Cut((1,), 4)) == Cut((1,), 4)
    assert cut_of_result(node, part, Cut((0,), 4)) == Cut((1,), 4)
    assert [cut_of_operand(node, each, Cut((1,), 4)) for each in (x, part)] == [Cut((1,), 4), Cut((0,), 4)]


def attention(b: Builder, dropout: float = 0.0, samples: int = 4) -> list[Any]:
    q, k, v = (b.input(name, samples, 2, 6, 8) for name in "qkv")
    mask = b.input("mask", 1, 1, 6, 6)
    node = b.call(aten._scaled_dot_product_efficient_attention.default, q, k, v, mask, True, dropout)
    return [node, q, mask, *(b.call(operator.getitem, node, at) for at in range(4))]


def test_attention_treats_every_sample_by_itself() -> None:
    node, query, mask, out, sums, seed, _ = attention(Builder())
    samples = Cut((0,), 4)
    assert cut_of_result(node, query, samples) == cut_of_operand(node, query, samples) == samples
    assert cut_of_operand(node, mask, samples) is None
    assert [cut_of_result(each, node, samples) for each in (out, sums, seed)] == [samples, samples, samples.at(())]
    assert cut_of_operand(seed, node, samples.at(())) == cut_of_operand(out, node, samples) == samples
    with pytest.raises(Mixes, match="elsewhere than in its first dimension"):
        cut_of_result(node, query, Cut((2,)))


@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (2, 4, 4)])
def test_a_mask_of_fewer_dimensions_is_for_all_samples_whatever_its_sizes(shape: tuple[int, ...]) -> None:
    b = Builder()
    q, k, v = (b.input(name, 4, 2, 4, 8) for name in "qkv")
    node = b.call(aten._scaled_dot_product_efficient_attention.default, q, k, v, mask := b.input("m", *shape), True)
    assert cut_of_operand(node, mask, Cut((0,), 4)) is None
    full = b.input("full", 4, 2, 4, 4)
    masked = b.call(aten._scaled_dot_product_efficient_attention.default, q, k, v, full, True)
    assert cut_of_operand(masked, full, Cut((0,), 4)) == Cut((0,), 4)


@pytest.mark.parametrize(("target", "more"), [(aten.gather.default, ()), (aten.scatter.value, (1.0,))])
def test_an_index_with_fewer_samples_is_not_repeated(target: Any, more: tuple[float, ...]) -> None:
    b = Builder()
    x, one, every = b.input("x", 4, 3), b.input("one", 1, 3, dtype=torch.int64), b.input("e", 4, 3, dtype=torch.int64)
    with pytest.raises(Mixes):
        cut_of_result(b.call(target, x, 1, one, *more), x, Cut((0,), 4))
    assert cut_of_result(b.call(target, x, 1, every, *more), x, Cut((0,), 4)) == Cut((0,), 4)


def test_attention_with_dropout_is_random() -> None:
    node, query, *_ = attention(Builder(), dropout=0.1)
    with pytest.raises(Mixes, match="is random"):
        cut_of_result(node, query, Cut((0,), 4))


@pytest.mark.parametrize(
    ("target", "args", "cut"),
    [
        (aten.permute.default, ([1, 0, 2],), (0, 1)),
        (aten.view.default, ([4, 3, 5],), (0,)),
        (aten.amax.default, ([0],), (0,)),
        (aten.sum.dim_IntList, ([0],), (0, 1)),
        (prims.rev.default, ([0],), (0,)),
        (aten.cumsum.default, (0,), (0,)),
    ],
)
def test_what_mixes(target: Any, args: tuple[Any, ...], cut: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input("x", 3, 4, 5)
    with pytest.raises(Mixes):
        cut_of_result(b.call(target, x, *args), x, Cut(cut))
