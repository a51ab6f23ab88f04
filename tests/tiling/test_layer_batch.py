"""A layer runs for some samples at a time: all of it, or none where something looks at several samples."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.graph.ops import PLACE
from zerograph.tiling.cuts import Cut, Mixes
from zerograph.tiling.layer_batch import batch_region
from zerograph.tiling.token_tiles import write_tiles

aten = torch.ops.aten
SAMPLES, TOKENS, WIDTH = 4, 3, 8


def builder() -> Builder:
    b = Builder()
    b.module = "L['self'].blocks.0"
    return b


def projected(b: Builder, x: fx.Node, name: str, width: int = WIDTH) -> fx.Node:
    rows = b.call(aten.view.default, x, [SAMPLES * TOKENS, WIDTH])
    return b.mm(rows, b.input(name, WIDTH, width))


def as_samples(b: Builder, x: fx.Node) -> fx.Node:
    return b.call(aten.view.default, x, [SAMPLES, TOKENS, WIDTH])


def layer(b: Builder, mixes: Any = None) -> tuple[fx.Node, fx.Node]:
    """Its widest product, and what it hands on: weights of tokens by each other, and a residual."""
    x = b.input("x", SAMPLES, TOKENS, WIDTH)
    keys = as_samples(b, projected(b, x, "key"))
    weights = b.call(aten.bmm.default, keys, b.call(aten.permute.default, keys, [0, 2, 1]))
    summed = b.call(aten.sum.dim_IntList, weights, [2], True)
    mixed = b.call(aten.bmm.default, b.call(aten.div.Tensor, weights, summed), keys)
    if mixes is not None:
        mixed = mixes(mixed)
    wide = projected(b, mixed, "up", 2 * WIDTH)
    down = b.mm(b.call(aten.relu.default, wide), b.input("down", 2 * WIDTH, WIDTH))
    return wide, b.call(aten.add.Tensor, x, as_samples(b, down))


def test_all_of_a_layer_is_inside_but_for_what_it_reads_whole() -> None:
    b = builder()
    wide, stream = layer(b)
    gm = b.output(b.call(aten.neg.default, stream))
    region = batch_region(wide)
    assert region.count == SAMPLES
    inside = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert region.nodes == inside
    assert {source.name for _, source in region.given} == {"x"}
    assert set(region.cuts.values()) == {Cut((0,), SAMPLES)}
    assert [n.name for n in region.exits()] == ["neg_default"]


def test_gradients_that_autograd_adds_leave_as_one() -> None:
    """Tracing names no module for the sum; that of a value from outside is another layer's."""
    b = builder()
    wide, stream = layer(b)
    other = b.call(aten.neg.default, as_samples(b, projected(b, stream, "other")))
    elsewhere = b.input("elsewhere", SAMPLES, TOKENS, WIDTH)
    b.module = None
    total, more = b.call(aten.add.Tensor, stream, other), b.call(aten.add.Tensor, other, elsewhere)
    b.output(total)
    region = batch_region(wide)
    assert total in region.cuts and more not in region.cuts


def test_gradients_of_weights_are_sums_over_samples() -> None:
    b = builder()
    wide, stream = layer(b)
    grad = b.input("grad", SAMPLES * TOKENS, 2 * WIDTH)
    rows = b.call(aten.permute.default, wide.args[0], [1, 0])
    summed = b.mm(rows, grad)
    bias = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, wide, grad), [0])
    b.output(stream, summed, bias)
    region = batch_region(wide)
    assert region.cuts[summed] is None and region.cuts[bias] is None
    assert region.given[summed, grad] == Cut((0,), SAMPLES)


def test_what_looks_at_several_samples_leaves_the_layer_whole() -> None:
    b = builder()
    wide, stream = layer(b, lambda x: b.call(aten.cumsum.default, x, 0))
    b.output(stream)
    with pytest.raises(Mixes, match="is not known to treat every sample by itself"):
        batch_region(wide)


def test_a_state_that_attention_saves_and_nobody_reads_is_the_first_parts() -> None:
    """As on CUDA, where the backward is given seed and offset, without dropout too."""
    b = builder()
    parts: list[fx.Node] = []

    def attended(x: fx.Node) -> fx.Node:
        heads = b.call(aten.view.default, x, [SAMPLES, 1, TOKENS, WIDTH])
        made = b.call(aten._scaled_dot_product_efficient_attention.default, heads, heads, heads, None, True)
        parts.extend(b.call(operator.getitem, made, at) for at in range(4))
        return as_samples(b, parts[0])

    wide, stream = layer(b, attended)
    gm = b.output(stream, *parts)
    assert write_tiles(gm.graph, batch_region(wide), 2) == 2
    gm.graph.lint()
    *_, sums, seed, offset = gm.graph.output_node().args[0]
    assert sums.target is PLACE
    attention = seed.args[0]
    assert (seed.args, offset.args) == ((attention, 2), (attention, 3)) and attention < sums.args[1]


def test_some_samples_are_no_part() -> None:
    b = builder()
    wide, stream = layer(b)
    b.output(stream, b.call(aten.slice.Tensor, stream, 0, 0, 2))
    with pytest.raises(Mixes, match="takes some samples"):
        batch_region(wide)


def test_random_numbers_are_drawn_for_all_samples_in_front() -> None:
    b = builder()

    def drop(x: fx.Node) -> fx.Node:
        return b.call(aten.mul.Tensor, x, b.call(aten.rand.default, [SAMPLES, TOKENS, WIDTH], name="drawn"))

    wide, stream = layer(b, drop)
    b.output(stream)
    region = batch_region(wide)
    assert {source.name for _, source in region.given} == {"x", "drawn"}


def test_a_mask_that_other_layers_read_stays_outside() -> None:
    b = builder()
    mask = b.call(aten.neg.default, b.input("given", SAMPLES, 1, WIDTH))
    wide, stream = layer(b, lambda x: b.call(aten.mul.Tensor, x, mask))
    b.module = "L['self'].blocks.1"
    b.output(b.call(aten.mul.Tensor, stream, mask))
    region = batch_region(wide)
    assert mask not in region.cuts and mask in {source for _, source in region.given}


@pytest.mark.parametrize(("samples", "why"), [(1, "has a batch of 1"), (0, "has a batch of 0")])
def test_a_batch_that_cannot_be_divided(samples: int, why: str) -> None:
    b = builder()
    rows = b.call(aten.view.default, b.input("x", samples, TOKENS, WIDTH), [samples * TOKENS, WIDTH])
    wide = b.mm(rows, b.input("up", WIDTH, WIDTH))
    b.output(wide)
    with pytest.raises(Mixes, match=why):
        batch_region(wide)
