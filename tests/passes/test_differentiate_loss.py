"""Gradients of a loss in tiles move to the forward, and the backward multiplies them by the loss's gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Activation
from zerograph.graph.ops import SCALE
from zerograph.passes import differentiate_loss

aten = torch.ops.aten


def graph(*tangent: int) -> tuple[fx.GraphModule, Plan]:
    """A joint graph: the sum of exponentials of logits, and the gradients of hidden states and head."""
    b = Builder()
    x, number = b.input("x", 5, 2), b.input("tangents_1", *tangent)
    (weight,) = b.params("weight", shape=(16, 2))
    logits = b.mm(x, b.call(aten.permute.default, weight, [1, 0]))
    logits.meta["zg"] = Activation("head:mm")
    powers = b.call(aten.exp.default, logits)
    loss = b.call(aten.sum.default, powers)
    grad = b.call(aten.mul.Tensor, powers, number)
    of_x = b.mm(grad, weight)
    of_weight = b.mm(b.call(aten.permute.default, grad, [1, 0]), x)
    gm = b.output(loss, of_x, b.reduce_grad(of_weight, weight))
    return gm, replace(plan(gm, "weight"), loss_tiles=2, head="head:mm")


def test_the_forward_computes_for_1_and_the_backward_multiplies() -> None:
    gm, p = graph()
    assert differentiate_loss(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
weight_full = unshard(weight_shard, weight)
permute_default = permute(weight_full, [1, 0])
mm_default = mm(x, permute_default)
exp_default = exp(mm_default)
sum_default = sum(exp_default)
full_default = full([], 1, torch.float32, cpu)
mul_tensor_1 = mul(exp_default, full_default)
mm_default_3 = mm(mul_tensor_1, weight_full)
mul_tensor_2 = mul(mm_default_3, tangents_1)
permute_default_2 = permute(mul_tensor_1, [1, 0])
mm_default_4 = mm(permute_default_2, x)
scale_default = scale(mm_default_4, tangents_1)
reduce_grad_default = reduce_grad(scale_default, weight)
return [sum_default, mul_tensor_2, reduce_grad_default]""",
    )
    saved = [node.name for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert saved == ["mm_default_3", "mm_default_4"]
    (scale,) = gm.graph.find_nodes(op="call_function", target=SCALE)
    assert scale.args[0].name == "mm_default_4", "what is as large as the weight is not there twice"


def test_nothing_moves_without_tiles_or_with_a_gradient_per_token() -> None:
    for gm, p in ((graph()[0], replace(graph()[1], loss_tiles=1)), graph(5, 1)):
        before = show(gm)
        assert differentiate_loss(gm, p) == 0
        assert show(gm) == before
