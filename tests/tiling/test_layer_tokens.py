"""Which part of a layer runs for some tokens at a time: what is wide, and around it what treats tokens one by one."""

from __future__ import annotations

import operator

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.graph.nodes import Activation
from zerograph.tiling.cuts import Cut, Mixes
from zerograph.tiling.layer_tokens import layer_region, wide_products

aten = torch.ops.aten
TOKENS, WIDTH, WIDE = 6, 2, 8
NAME = "blocks.0.mlp:mm"


def builder() -> Builder:
    b = Builder()
    b.module = "L['self'].blocks.0"
    return b


def wide(b: Builder, x: fx.Node) -> fx.Node:
    """The product that begins an MLP."""
    middle = b.mm(x, b.input("up", WIDTH, WIDE))
    middle.meta["zg"] = Activation(NAME)
    return middle


def names(product: fx.Node) -> list[str]:
    return [node.name for node in layer_region(product).nodes]


def test_norm_and_residual_are_inside_and_attention_is_not() -> None:
    b = builder()
    mixed = b.call(aten.cumsum.default, b.input("x", TOKENS, WIDTH), 0)  # a token reads others
    several = b.call(aten.var_mean.correction, mixed, [1])
    several.kwargs = {"correction": 0, "keepdim": True}
    with b.mode:
        several.meta["val"] = aten.var_mean.correction(mixed.meta["val"], [1], correction=0, keepdim=True)
    variance, mean = (b.call(operator.getitem, several, at) for at in (0, 1))
    normed = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, mixed, mean), variance)
    middle = wide(b, normed)
    down = b.mm(b.call(aten.relu.default, middle), b.input("down", WIDE, WIDTH))
    stream = b.call(aten.add.Tensor, mixed, down)
    b.output(b.call(aten.cumsum.default, stream, 0))
    region = layer_region(middle)
    assert [n.name for n in region.nodes] == [
        several.name, variance.name, mean.name, normed.args[0].name, normed.name, middle.name, "relu_default",
        down.name, stream.name,
    ]  # fmt: skip
    assert [n.name for n in region.exits()] == [stream.name]
    assert {source.name for _, source in region.given} == {mixed.name}
    assert set(region.cuts.values()) == {Cut((0,))}


def test_a_second_product_as_wide_begins_it_too() -> None:
    b = builder()
    x = b.input("x", TOKENS, WIDTH)
    gate = b.mm(x, b.input("gate", WIDTH, WIDE))
    b.output(b.mm(b.call(aten.mul.Tensor, wide(b, x), gate), b.input("down", WIDE, WIDTH)))
    assert gate.name in names(next(wide_products(b.graph.nodes, [NAME])))


def test_tokens_that_are_repeated_are_repeated_outside() -> None:
    b = builder()
    down = b.mm(middle := wide(b, b.input("x", TOKENS, WIDTH)), b.input("down", WIDE, WIDTH))
    one = b.call(aten.view.default, down, [1, TOKENS, WIDTH])
    b.output(b.call(aten.mul.Tensor, one, b.input("three", 3, TOKENS, 1)))
    assert names(middle) == [middle.name, down.name, one.name]


def test_what_another_layer_makes_stays_outside() -> None:
    b = builder()
    b.module = "L['self'].blocks.1"
    before = b.call(aten.neg.default, b.input("x", TOKENS, WIDTH))
    b.module = "L['self'].blocks.0"
    middle = wide(b, before)
    b.output(b.mm(middle, b.input("down", WIDE, WIDTH)))
    assert before.name not in names(middle)


def test_what_waits_for_something_that_mixes_tokens_stays_outside() -> None:
    """A sum of what the MLP makes and of what is mixed from it: tiles would wait for each other."""
    b = builder()
    middle = wide(b, b.input("x", TOKENS, WIDTH))
    down = b.mm(b.call(aten.relu.default, middle), b.input("down", WIDE, WIDTH))
    both = b.call(aten.add.Tensor, down, b.call(aten.cumsum.default, down, 0))
    b.output(both)
    assert names(middle) == [middle.name, "relu_default", down.name]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda b, middle: b.call(aten.cumsum.default, middle, 0), "cumsum.default is not known"),
        (lambda b, middle: b.call(aten.argsort.default, middle, 1), "argsort.default is not known"),
    ],
    ids=["mixed", "unknown"],
)
def test_a_middle_that_is_needed_whole(what, why: str) -> None:
    b = builder()
    middle = wide(b, b.input("x", TOKENS, WIDTH))
    b.output(what(b, middle))
    with pytest.raises(Mixes, match=why):
        layer_region(middle)


def test_a_product_that_widens_nothing_begins_none() -> None:
    b = builder()
    narrow = b.mm(b.input("x", TOKENS, WIDE), b.input("w", WIDE, WIDE))
    narrow.meta["zg"] = Activation(NAME)
    b.output(narrow)
    with pytest.raises(Mixes, match="makes nothing wider than what it reads"):
        layer_region(narrow)


def test_parts_of_one_product_are_cut_and_joined() -> None:
    """A gate and a value from one weight, and their gradients in one again."""
    b = builder()
    middle = wide(b, b.input("x", TOKENS, WIDTH))
    gate, value = (b.call(aten.slice.Tensor, middle, 1, at, at + WIDE // 2) for at in (0, WIDE // 2))
    joined = b.call(aten.cat.default, [b.call(aten.mul.Tensor, gate, value), gate], 1)
    b.output(b.mm(joined, b.input("down", WIDE, WIDTH)))
    assert joined.name in names(middle)
