"""Head and loss are written once for each tile of tokens, and compute the same (``tiling/token_tiles.py``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.core.plan import Plan, token_tiles
from zerograph.graph.nodes import Activation
from zerograph.passes import tile_tokens

aten = torch.ops.aten


def graph(tokens: int = 5) -> tuple[fx.GraphModule, Plan]:
    """The backward of a head: logits are made again, and become gradients of weight and input."""
    b = Builder()
    x, scale = b.input("x", tokens, 2), b.input("scale", tokens, 1)
    (weight,) = b.params("weight", shape=(16, 2))
    logits = b.mm(x, b.call(aten.permute.default, weight, [1, 0]))
    logits.meta["zg"] = Activation("head:mm")
    grad = b.call(aten.mul.Tensor, logits, scale)
    of_x = b.mm(grad, weight)
    of_weight = b.mm(b.call(aten.permute.default, grad, [1, 0]), x)
    gm = b.output(of_x, b.reduce_grad(of_weight, weight))
    return gm, replace(plan(gm, "weight"), loss_tiles=2, head="head:mm")


def test_tiles_are_views_operators_and_ends() -> None:
    gm, p = graph()
    assert tile_tokens(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
weight_full = unshard(weight_shard, weight)
permute_default = permute(weight_full, [1, 0])
view_default = view(x, 0, 0, 3)
view_default_1 = view(scale, 0, 0, 3)
mm_default_3 = mm(view_default, permute_default)
mul_tensor_1 = mul(mm_default_3, view_default_1)
mm_default_4 = mm(mul_tensor_1, weight_full)
permute_default_2 = permute(mul_tensor_1, [1, 0])
place_default = place([mm_default_4], None, [5, 2], 0, 0)
accumulate_default = accumulate([permute_default_2, view_default], None)
view_default_2 = view(x, 0, 3, 5)
view_default_3 = view(scale, 0, 3, 5)
mm_default_5 = mm(view_default_2, permute_default)
mul_tensor_2 = mul(mm_default_5, view_default_3)
mm_default_6 = mm(mul_tensor_2, weight_full)
permute_default_3 = permute(mul_tensor_2, [1, 0])
place_default_1 = place([mm_default_6], place_default, [5, 2], 0, 3)
accumulate_default_1 = accumulate([permute_default_3, view_default_2], accumulate_default)
reduce_grad_default = reduce_grad(accumulate_default_1, weight)
return [place_default_1, reduce_grad_default]""",
    )


def shifted() -> tuple[fx.GraphModule, Plan]:
    """The backward of a head of two sequences of three tokens, whose last ones have no label."""
    b = Builder()
    x, scale = b.input("x", 6, 2), b.input("scale", 2, 2, 1)
    (weight,) = b.params("weight", shape=(16, 2))
    logits = b.mm(x, b.call(aten.permute.default, weight, [1, 0]))
    logits.meta["zg"] = Activation("head:mm")
    kept = b.call(aten.slice.Tensor, b.call(aten.view.default, logits, [2, 3, 16]), 1, 0, -1)
    zeros = b.call(aten.full.default, [2, 3, 16], 0.0)
    grad = b.call(aten.slice_scatter.default, zeros, b.call(aten.mul.Tensor, kept, scale), 1, 0, -1)
    flat = b.call(aten.view.default, grad, [6, 16])
    of_weight = b.mm(b.call(aten.permute.default, flat, [1, 0]), x)
    gm = b.output(b.mm(flat, weight), b.reduce_grad(of_weight, weight))
    return gm, replace(plan(gm, "weight"), loss_tiles=2, head="head:mm")


def test_tiles_are_of_the_tokens_that_a_slice_keeps() -> None:
    gm, p = shifted()
    assert tile_tokens(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
weight_full = unshard(weight_shard, weight)
permute_default = permute(weight_full, [1, 0])
reshape_default = reshape(x, [2, 3, 2])
slice_tensor_1 = slice(reshape_default, 1, 0, 2, 1)
reshape_default_1 = reshape(slice_tensor_1, [4, 2])
view_default_2 = view(reshape_default_1, 0, 0, 2)
reshape_default_2 = reshape(scale, [1, 4, 1])
view_default_3 = view(reshape_default_2, 1, 0, 2)
mm_default_3 = mm(view_default_2, permute_default)
view_default_4 = view(mm_default_3, [1, 2, 16])
mul_tensor_1 = mul(view_default_4, view_default_3)
view_default_5 = view(mul_tensor_1, [2, 16])
permute_default_2 = permute(view_default_5, [1, 0])
mm_default_4 = mm(view_default_5, weight_full)
accumulate_default = accumulate([permute_default_2, view_default_2], None)
place_default = place([mm_default_4], None, [4, 2], 0, 0)
view_default_6 = view(reshape_default_1, 0, 2, 4)
view_default_7 = view(reshape_default_2, 1, 2, 4)
mm_default_5 = mm(view_default_6, permute_default)
view_default_8 = view(mm_default_5, [1, 2, 16])
mul_tensor_2 = mul(view_default_8, view_default_7)
view_default_9 = view(mul_tensor_2, [2, 16])
permute_default_3 = permute(view_default_9, [1, 0])
mm_default_6 = mm(view_default_9, weight_full)
accumulate_default_1 = accumulate([permute_default_3, view_default_6], accumulate_default)
place_default_1 = place([mm_default_6], place_default, [4, 2], 0, 2)
view_default_10 = view(place_default_1, [2, 2, 2])
full_default_1 = full([2, 3, 2], 0, torch.float32, cpu)
slice_scatter_default_1 = slice_scatter(full_default_1, view_default_10, 1, 0, 2, 1)
view_default_11 = view(slice_scatter_default_1, [6, 2])
reduce_grad_default = reduce_grad(accumulate_default_1, weight)
return [view_default_11, reduce_grad_default]""",
    )


def test_a_mean_over_all_is_a_sum_of_shares() -> None:
    b = Builder()
    logits = b.mm(b.input("x", 5, 2), b.input("weight", 2, 16))
    logits.meta["zg"] = Activation("head:mm")
    gm = b.output(b.call(aten.mean.default, b.call(aten.exp.default, logits)))
    assert tile_tokens(gm, Plan(3, 2, (), 1, loss_tiles=2, head="head:mm")) == 2
    assert_expected_inline(
        show(gm),
        """\
view_default = view(x, 0, 0, 3)
mm_default_1 = mm(view_default, weight)
exp_default_1 = exp(mm_default_1)
mean_default_1 = mean(exp_default_1)
mul_tensor = mul(mean_default_1, 0.6)
accumulate_default = accumulate([mul_tensor], None)
view_default_1 = view(x, 0, 3, 5)
mm_default_2 = mm(view_default_1, weight)
exp_default_2 = exp(mm_default_2)
mean_default_2 = mean(exp_default_2)
mul_tensor_1 = mul(mean_default_2, 0.4)
accumulate_default_1 = accumulate([mul_tensor_1], accumulate_default)
return [accumulate_default_1]""",
    )


def test_without_tiles_or_the_plan_s_logits_nothing_changes() -> None:
    gm, p = graph()
    before = show(gm)
    assert tile_tokens(gm, replace(p, loss_tiles=1, head="")) == tile_tokens(gm, replace(p, head="other:mm")) == 0
    assert show(gm) == before


def test_tiles_cover_all_tokens_once_and_long_ones_begin_at_cache_lines() -> None:
    for count, tiles in ((5, 2), (1, 4), (7, 7), (2048, 16), (1000, 3), (0, 2)):
        cut = token_tiles(count, tiles)
        assert [token for begin, end in cut for token in range(begin, end)] == list(range(count))
        assert len(cut) <= tiles and len({end - begin for begin, end in cut}) <= 2
    assert token_tiles(1000, 3) == ((0, 336), (336, 672), (672, 1000))
