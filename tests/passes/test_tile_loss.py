"""Head and loss are written once for each tile of tokens, and compute the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.core.plan import Plan, token_tiles
from zerograph.graph.nodes import Activation
from zerograph.passes import tile_loss

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
    assert tile_loss(gm, p) == 2
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


def test_without_tiles_or_the_plan_s_logits_nothing_changes() -> None:
    gm, p = graph()
    before = show(gm)
    assert tile_loss(gm, replace(p, loss_tiles=1, head="")) == tile_loss(gm, replace(p, head="other:mm")) == 0
    assert show(gm) == before


def test_tiles_cover_all_tokens_once_and_long_ones_begin_at_cache_lines() -> None:
    for count, tiles in ((5, 2), (1, 4), (7, 7), (2048, 16), (1000, 3), (0, 2)):
        cut = token_tiles(count, tiles)
        assert [token for begin, end in cut for token in range(begin, end)] == list(range(count))
        assert len(cut) <= tiles and len({end - begin for begin, end in cut}) <= 2
    assert token_tiles(1000, 3) == ((0, 336), (336, 672), (672, 1000))
