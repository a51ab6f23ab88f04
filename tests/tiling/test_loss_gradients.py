"""Which gradients one number scales, by the operators between it and them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.tiling.loss_gradients import LossGradients, loss_gradients
from zerograph.tiling.token_region import region_of

aten, prims = torch.ops.aten, torch.ops.prims
TOKENS, WORDS, WIDTH = 12, 64, 4

Scaling = Callable[[Builder, fx.Node, fx.Node], fx.Node]


def found_of(
    scaled: Scaling, tangent: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> tuple[LossGradients | None, fx.Node, fx.Node]:
    """What is found where ``scaled`` makes the logits' gradient of logits and tangent; both factors' gradients."""
    b = Builder()
    x, weight = b.input("x", TOKENS, WIDTH, dtype=dtype), b.input("weight", WIDTH, WORDS, dtype=dtype)
    number = b.input("tangents_1", *tangent, dtype=dtype)
    logits = b.mm(x, weight)
    loss = b.call(aten.sum.default, b.call(aten.exp.default, logits))
    grad = scaled(b, b.call(aten.exp.default, logits), number)
    of_x = b.mm(grad, b.call(aten.permute.default, weight, [1, 0]))
    of_weight = b.mm(b.call(aten.permute.default, x, [1, 0]), grad)
    gm = b.output(loss, of_x, of_weight)
    return loss_gradients(gm.graph, region_of(logits)), of_x, of_weight


def times(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return b.call(aten.mul.Tensor, made, tangent)


def test_gradients_of_both_factors_depend_on_one_number() -> None:
    found, *grads = found_of(times)
    assert found is not None
    assert found.tangent.name == "tangents_1" and found.exits == grads
    assert [node.name for node in found.nodes] == ["mul_tensor", "mm_default_1", "mm_default_2"]


def divided(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return times(b, made, b.call(aten.div.Tensor, b.call(aten.neg.default, tangent), 7))


def chosen(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    zero = b.call(aten.full.default, [], 0.0)
    each = b.call(aten.where.self, b.input("wanted", TOKENS, 1, dtype=torch.bool), tangent, zero)
    return times(b, made, each)


def softmax(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    grad = times(b, made, tangent)
    total = b.call(aten.sum.dim_IntList, grad, [1], True)
    return b.call(prims.fma.default, b.call(aten.neg.default, made), total, grad)


def padded(b: Builder, made: fx.Node, tangent: fx.Node, *filled: float) -> fx.Node:
    """As a slice of the logits has it in the backward, with zeros."""
    part = times(b, b.call(aten.slice.Tensor, made, 1, 0, WORDS - 1), tangent)
    return b.call(aten.constant_pad_nd.default, part, [0, 1], *filled)


@pytest.mark.parametrize("scaled", [divided, chosen, softmax, padded], ids=lambda f: f.__name__)
def test_what_losses_do_with_it_is_linear(scaled: Scaling) -> None:
    assert found_of(scaled)[0] is not None


def squared(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return times(b, made, times(b, tangent, tangent))


def inverse(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return b.call(aten.div.Tensor, made, tangent)


def clamped(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    """As a user's own backward may have it."""
    return b.call(aten.clamp.default, times(b, made, tangent), -1, 1)


def shifted(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, made, times(b, made, tangent))


def shifted_product(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return b.call(prims.fma.default, made, times(b, made, tangent), made)


def shifted_by_product(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return b.call(prims.fma.default, made, made, times(b, made, tangent))


def otherwise(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    one = b.call(aten.full.default, [], 1.0)
    return times(b, made, b.call(aten.where.self, b.input("wanted", TOKENS, 1, dtype=torch.bool), tangent, one))


def padded_with_ones(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    return padded(b, made, tangent, 1.0)


def of_two(b: Builder, made: fx.Node, tangent: fx.Node) -> fx.Node:
    other = times(b, made, b.input("tangents_2"))
    return b.call(aten.add.Tensor, times(b, made, tangent), other)


NOT_LINEAR = [
    squared, inverse, clamped, shifted, shifted_product, shifted_by_product, otherwise, padded_with_ones, of_two,
]  # fmt: skip


@pytest.mark.parametrize("scaled", NOT_LINEAR)
def test_what_is_not_linear_in_one_number_is_left(scaled: Scaling) -> None:
    assert found_of(scaled)[0] is None


def test_a_number_per_token_and_16_bits_that_need_a_scaled_loss_are_left() -> None:
    assert found_of(times, (TOKENS, 1))[0] is None
    assert found_of(times, dtype=torch.float16)[0] is None
    assert found_of(times, dtype=torch.bfloat16)[0] is not None
