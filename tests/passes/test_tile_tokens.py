"""An MLP is written once for each tile of tokens, with the norm and the residual around it, and computes the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Activation
from zerograph.passes import tile_tokens

aten = torch.ops.aten
NAME = "blocks.0.mlp:mm"


def graph(*, backward: bool = False) -> tuple[fx.GraphModule, Plan]:
    """A norm, an MLP and a residual; or what their backward makes of the gradient ``dy``, where the middle is made
    again."""
    b = Builder()
    b.module = "L['self'].blocks.0"
    x, scale = b.input("x", 5, 2), b.input("scale", 5, 1)
    up, down = (b.params(name, shape=shape)[0] for name, shape in (("up", (8, 2)), ("down", (2, 8))))
    normed = b.call(aten.mul.Tensor, x, scale)
    middle = b.mm(normed, b.call(aten.permute.default, up, [1, 0]))
    middle.meta["zg"] = Activation(NAME)
    active = b.call(aten.relu.default, middle)
    if backward:
        dy = b.input("dy", 5, 2)
        of_down = b.mm(b.call(aten.permute.default, dy, [1, 0]), active)
        grad = b.call(aten.mul.Tensor, b.mm(dy, down), b.call(aten.sign.default, active))
        of_up = b.mm(b.call(aten.permute.default, grad, [1, 0]), normed)
        of_x = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, b.mm(grad, up), scale), dy)
        ends = (of_x, b.reduce_grad(of_up, up), b.reduce_grad(of_down, down))
    else:
        ends = (b.call(aten.add.Tensor, b.mm(active, b.call(aten.permute.default, down, [1, 0])), x),)
    gm = b.output(*ends)
    tiles = {"recompute": ("blocks.0",), "token_tiles": 2, "token_regions": (NAME,)}
    return gm, replace(plan(gm, "up", "down"), **tiles)


def test_the_forward_makes_no_middle_of_all_tokens() -> None:
    gm, p = graph()
    assert tile_tokens(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
up_full = unshard(up_shard, up)
down_full = unshard(down_shard, down)
permute_default = permute(up_full, [1, 0])
permute_default_1 = permute(down_full, [1, 0])
view_default = view(x, 0, 0, 3)
view_default_1 = view(scale, 0, 0, 3)
mul_tensor_1 = mul(view_default, view_default_1)
mm_default_2 = mm(mul_tensor_1, permute_default)
relu_default_1 = relu(mm_default_2)
mm_default_3 = mm(relu_default_1, permute_default_1)
add_tensor_1 = add(mm_default_3, view_default)
place_default = place([add_tensor_1], None, [5, 2], 0, 0)
view_default_2 = view(x, 0, 3, 5)
view_default_3 = view(scale, 0, 3, 5)
mul_tensor_2 = mul(view_default_2, view_default_3)
mm_default_4 = mm(mul_tensor_2, permute_default)
relu_default_2 = relu(mm_default_4)
mm_default_5 = mm(relu_default_2, permute_default_1)
add_tensor_2 = add(mm_default_5, view_default_2)
place_default_1 = place([add_tensor_2], place_default, [5, 2], 0, 3)
return [place_default_1]""",
    )


def test_the_backward_makes_the_middle_of_a_tile_again_right_before_its_gradients() -> None:
    gm, p = graph(backward=True)
    assert tile_tokens(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
up_full = unshard(up_shard, up)
down_full = unshard(down_shard, down)
permute_default = permute(up_full, [1, 0])
view_default = view(dy, 0, 0, 3)
view_default_1 = view(scale, 0, 0, 3)
view_default_2 = view(x, 0, 0, 3)
mul_tensor_3 = mul(view_default_2, view_default_1)
mm_default_5 = mm(mul_tensor_3, permute_default)
relu_default_1 = relu(mm_default_5)
permute_default_3 = permute(view_default, [1, 0])
mm_default_6 = mm(view_default, down_full)
sign_default_1 = sign(relu_default_1)
mul_tensor_4 = mul(mm_default_6, sign_default_1)
permute_default_4 = permute(mul_tensor_4, [1, 0])
mm_default_7 = mm(mul_tensor_4, up_full)
mul_tensor_5 = mul(mm_default_7, view_default_1)
add_tensor_1 = add(mul_tensor_5, view_default)
accumulate_default = accumulate([permute_default_3, relu_default_1], None)
accumulate_default_1 = accumulate([permute_default_4, mul_tensor_3], None)
place_default = place([add_tensor_1], None, [5, 2], 0, 0)
view_default_3 = view(dy, 0, 3, 5)
view_default_4 = view(scale, 0, 3, 5)
view_default_5 = view(x, 0, 3, 5)
mul_tensor_6 = mul(view_default_5, view_default_4)
mm_default_8 = mm(mul_tensor_6, permute_default)
relu_default_2 = relu(mm_default_8)
permute_default_5 = permute(view_default_3, [1, 0])
mm_default_9 = mm(view_default_3, down_full)
sign_default_2 = sign(relu_default_2)
mul_tensor_7 = mul(mm_default_9, sign_default_2)
permute_default_6 = permute(mul_tensor_7, [1, 0])
mm_default_10 = mm(mul_tensor_7, up_full)
mul_tensor_8 = mul(mm_default_10, view_default_4)
add_tensor_2 = add(mul_tensor_8, view_default_3)
accumulate_default_2 = accumulate([permute_default_5, relu_default_2], accumulate_default)
accumulate_default_3 = accumulate([permute_default_6, mul_tensor_6], accumulate_default_1)
place_default_1 = place([add_tensor_2], place_default, [5, 2], 0, 3)
reduce_grad_default = reduce_grad(accumulate_default_3, up)
reduce_grad_default_1 = reduce_grad(accumulate_default_2, down)
return [place_default_1, reduce_grad_default, reduce_grad_default_1]""",
    )


def test_without_tiles_nothing_changes() -> None:
    gm, p = graph()
    before = show(gm)
    assert tile_tokens(gm, replace(p, token_tiles=1, token_regions=())) == 0
    assert show(gm) == before


def test_what_is_no_longer_by_token_stays_untiled_with_a_warning(caplog) -> None:
    b = Builder()
    middle = b.mm(b.input("x", 5, 2), b.input("w", 2, 8))
    middle.meta["zg"] = Activation(NAME)
    gm = b.output(b.call(aten.cumsum.default, middle, 0))
    before = show(gm)
    assert tile_tokens(gm, graph()[1]) == 0
    assert show(gm) == before
    assert "blocks.0.mlp:mm begins runs whole: aten.cumsum.default is not known" in caplog.text
