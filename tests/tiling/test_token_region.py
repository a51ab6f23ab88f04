"""What can run for some tokens at a time, by how operators treat them; and what cannot, with the reason."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from graphs import Builder
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zerograph.tiling.cuts import Cut, Mixes
from zerograph.tiling.token_region import region_of
from zerograph.tiling.windows import Window

aten = torch.ops.aten
TOKENS, WORDS, WIDTH = 12, 64, 4


def head(b: Builder) -> fx.Node:
    """Logits of twelve tokens, which are three sequences of four."""
    x, weight = b.input("x", TOKENS, WIDTH), b.input("weight", WIDTH, WORDS)
    return b.mm(x, weight)


def entropy(b: Builder, logits: fx.Node) -> fx.Node:
    most = b.call(aten.amax.default, logits, [1], True)
    least = b.call(aten.sub.Tensor, logits, most)
    total = b.call(aten.sum.dim_IntList, b.call(aten.exp.default, least), [1], True)
    return b.call(aten.sub.Tensor, least, b.call(aten.log.default, total))


def test_all_that_is_as_large_as_logits_is_inside_and_what_lies_between() -> None:
    b = Builder()
    logits = head(b)
    wanted = b.input("wanted", TOKENS, 1, dtype=torch.int64)
    found = entropy(b, logits)
    picked = b.call(aten.gather.default, found, 1, wanted)
    b.output(b.call(aten.sum.default, picked))
    region = region_of(logits)
    names = [node.name for node in region.nodes]
    assert names == ["mm_default", "amax_default", "sub_tensor", "exp_default", "sum_dim_int_list", "log_default",
                     "sub_tensor_1", "gather_default"]  # fmt: skip
    assert [node.name for node in region.exits()] == ["gather_default"]
    assert set(region.cuts.values()) == {Cut((0,))}
    assert {source.name: tokens for (_, source), tokens in region.given.items()} == {
        "x": Cut((0,)),
        "wanted": Cut((0,)),
    }


def test_batch_and_sequence_are_tokens_together() -> None:
    b = Builder()
    logits = b.call(aten.view.default, head(b), [3, 4, WORDS])
    mask = b.input("mask", 3, 4, 1)
    total = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, logits, mask), [-1])
    b.output(total)
    region = region_of(logits.args[0])
    assert region.cuts[logits] == region.cuts[total] == Cut((0, 1))
    assert Cut((0, 1)).of_part([3, 4, WORDS], 5) == [1, 5, WORDS]
    assert region.given[total.args[0], mask] == Cut((0, 1))


def test_sums_over_tokens_leave_with_their_factors() -> None:
    """The gradients of weight, bias and input."""
    b = Builder()
    logits = head(b)
    x, weight = logits.args
    grad = b.call(aten.mul.Tensor, logits, logits)
    of_weight = b.mm(b.call(aten.permute.default, grad, [1, 0]), x)
    of_bias = b.call(aten.sum.dim_IntList, grad, [0])
    of_x = b.mm(grad, b.call(aten.permute.default, weight, [1, 0]))
    b.output(of_weight, of_bias, of_x)
    region = region_of(logits)
    assert region.cuts[of_weight] is None and region.cuts[of_bias] is None
    assert region.cuts[of_x] == Cut((0,))
    assert region.exits() == [of_weight, of_bias, of_x]


def test_what_is_large_and_made_for_logits_is_made_by_tile_too() -> None:
    """A mask of all words, as gradients of a lookup are written."""
    b = Builder()
    logits = head(b)
    wanted, words = b.input("wanted", TOKENS, 1), b.input("words", 1, WORDS)
    expanded = b.call(aten.expand.default, wanted, [TOKENS, WORDS])
    mask = b.call(aten.eq.Tensor, expanded, words)
    b.output(b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, logits, mask), [1]))
    region = region_of(logits)
    assert region.cuts[mask] == region.cuts[expanded] == Cut((0,))
    assert (mask, words) not in region.given and region.given[expanded, wanted] == Cut((0,))


def test_a_reduction_over_all_dimensions_sums_over_tokens() -> None:
    b = Builder()
    logits = head(b)
    total = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, logits, logits), None)
    b.output(total)
    assert region_of(logits).cuts[total] is None


def viewed(b: Builder, logits: fx.Node) -> fx.Node:
    return b.call(aten.view.default, logits, [3, 4, WORDS])


def test_shifted_logits_are_a_head_of_fewer_tokens() -> None:
    """The slice's gradient is written among zeros, of which gradients of head and input know nothing."""
    b = Builder()
    logits = head(b)
    x, weight = logits.args
    kept = b.call(aten.slice.Tensor, viewed(b, logits), 1, 0, -1)
    loss = b.call(aten.sum.dim_IntList, b.call(aten.clone.default, kept), [-1])
    zeros = b.call(aten.full.default, [3, 4, WORDS], 0)
    grad = b.call(aten.slice_scatter.default, zeros, b.call(aten.mul.Tensor, kept, kept), 1, 0, -1)
    flat = b.call(aten.view.default, grad, [TOKENS, WORDS])
    of_weight = b.mm(b.call(aten.permute.default, flat, [1, 0]), x)
    of_x = b.mm(flat, b.call(aten.permute.default, weight, [1, 0]))
    b.output(loss, of_weight, of_x)
    region = region_of(logits)
    assert region.count == 9 and region.window == Window((3, 4), 1, 0, 3, 1)
    assert region.exits() == [loss, of_weight, of_x] and zeros not in region.cuts
    assert [region.counts_all(n, region.cuts[n]) for n in (logits, kept, loss, grad, of_x)] == [
        True, False, False, True, True
    ]  # fmt: skip


def test_words_may_stand_between_batch_and_sequence() -> None:
    b = Builder()
    logits = head(b)
    turned = b.call(aten.permute.default, viewed(b, logits), [0, 2, 1])
    most = b.call(aten.amax.default, turned, [1], True)
    total = b.call(aten.sum.dim_IntList, b.call(aten.sub.Tensor, turned, most), [1], True)
    b.output(b.call(aten.squeeze.dim, total, 1))
    region = region_of(logits)
    assert region.cuts[turned] == region.cuts[most] == Cut((0, 2)) and region.exits() == [total]


def returned(b: Builder, logits: fx.Node) -> fx.Node:
    return logits


def softmax_over_tokens(b: Builder, logits: fx.Node) -> fx.Node:
    return b.call(aten.amax.default, logits, [0])


def shifted_and_full(b: Builder, logits: fx.Node) -> fx.Node:
    """One term of the loss reads tokens that another one leaves out."""
    kept = b.call(aten.sum.dim_IntList, b.call(aten.slice.Tensor, viewed(b, logits), 1, 0, 3), [2])
    return b.call(aten.add.Tensor, b.call(aten.sum.default, kept), b.call(aten.sum.default, logits))


def of_two_windows(b: Builder, logits: fx.Node) -> fx.Node:
    """As predictions of several next tokens are compared."""
    early, late = (b.call(aten.slice.Tensor, viewed(b, logits), 1, at, at + 3) for at in (0, 1))
    return b.call(aten.sum.default, b.call(aten.mul.Tensor, early, late))


def written_among(b: Builder, logits: fx.Node) -> fx.Node:
    other = b.input("other", 3, 4, WORDS)
    kept = b.call(aten.slice.Tensor, viewed(b, logits), 1, 0, 3)
    return b.call(aten.sum.dim_IntList, b.call(aten.slice_scatter.default, other, kept, 1, 0, 3), [2])


def not_zero_outside(b: Builder, logits: fx.Node) -> fx.Node:
    kept = b.call(aten.slice.Tensor, viewed(b, logits), 1, 0, 3)
    zeros = b.call(aten.full.default, [3, 4, WORDS], 0)
    written = b.call(aten.slice_scatter.default, zeros, kept, 1, 0, 3)
    return b.call(aten.sum.dim_IntList, b.call(aten.exp.default, written), [2])


def at_a_size(b: Builder, logits: fx.Node) -> fx.Node:
    end = b.graph.placeholder("end")
    end.meta["val"] = 3
    return b.call(aten.slice.Tensor, viewed(b, logits), 1, 0, end)


def with_unknown_tokens(b: Builder, logits: fx.Node) -> fx.Node:
    mask = b.input("mask", TOKENS, WORDS)
    masked = b.call(aten.mul.Tensor, logits, mask)
    dynamic = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    mask.meta["val"] = dynamic.from_tensor(torch.empty(TOKENS, WORDS))
    return b.call(aten.sum.dim_IntList, masked, [1])


def turned_around(b: Builder, logits: fx.Node) -> fx.Node:
    return b.call(aten.permute.default, viewed(b, logits), [1, 0, 2])


def summed_up(b: Builder, logits: fx.Node) -> fx.Node:
    return b.call(aten.cumsum.default, logits, 0)


def parts(b: Builder, logits: fx.Node) -> fx.Node:
    """An operator of two results."""
    return b.call(operator.getitem, b.call(aten.max.dim, logits, 1), 0)


def by_position(b: Builder, logits: fx.Node) -> fx.Node:
    """Another weight for each position, alike in all sequences."""
    return b.call(aten.mul.Tensor, b.call(aten.view.default, logits, [3, 4, WORDS]), b.input("w", 4, 1))


def repeated(b: Builder, logits: fx.Node) -> fx.Node:
    """One sequence, beside each of four."""
    one = b.call(aten.view.default, logits, [1, TOKENS, WORDS])
    return b.call(aten.sum.dim_IntList, b.call(aten.expand.default, one, [4, TOKENS, WORDS]), [2])


def with_four_others(b: Builder, logits: fx.Node) -> fx.Node:
    one = b.call(aten.view.default, logits, [1, TOKENS, WORDS])
    return b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, one, b.input("four", 4, TOKENS, 1)), [2])


def repeated_before_it_is_shifted(b: Builder, logits: fx.Node) -> fx.Node:
    one = b.call(aten.expand.default, b.call(aten.view.default, logits, [1, TOKENS, WORDS]), [4, TOKENS, WORDS])
    return b.call(aten.sum.dim_IntList, b.call(aten.slice.Tensor, one, 1, 0, 11), [2])


def centered(b: Builder, logits: fx.Node) -> fx.Node:
    """A sum over tokens that is read as if it were one of words."""
    mean = b.call(aten.sum.dim_IntList, logits, [0])
    return b.call(aten.sum.dim_IntList, b.call(aten.sub.Tensor, logits, mean), [1])


def shared_among_tokens(b: Builder, logits: fx.Node) -> fx.Node:
    part = b.call(aten.exp.default, logits)
    return b.call(aten.div.Tensor, part, b.call(aten.sum.dim_IntList, part, [0], True))


def compared(b: Builder, logits: fx.Node) -> fx.Node:
    """Each token with each other: one factor is read whole, and made of what is cut."""
    return b.mm(logits, b.call(aten.permute.default, b.call(aten.exp.default, logits), [1, 0]))


def gram(b: Builder, logits: fx.Node) -> fx.Node:
    return b.mm(logits, b.mm(b.call(aten.permute.default, logits, [1, 0]), logits))


def decayed(b: Builder, logits: fx.Node) -> fx.Node:
    """A gradient with weight decay, which is no sum of the tiles' ones."""
    turned = b.call(aten.permute.default, b.call(aten.exp.default, logits), [1, 0])
    return b.call(aten.addmm.default, b.input("decay", WORDS, WIDTH), turned, b.input("y", TOKENS, WIDTH))


def two_results(b: Builder, logits: fx.Node) -> fx.Node:
    mantissa = b.call(operator.getitem, b.call(aten.frexp.Tensor, b.input("z", TOKENS, WORDS)), 0)
    return b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, logits, mantissa), [1])


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (centered, "reads a sum over all tokens"),
        (shared_among_tokens, "reads a sum over all tokens"),
        (compared, "reads all tokens|mixes tokens"),
        (gram, "reads all tokens|reads a sum|mixes tokens"),
        (decayed, "adds something to a sum over tokens"),
        (returned, "returns logits"),
        (softmax_over_tokens, "does more than sum over tokens"),
        (shifted_and_full, "reads more tokens than a slice of the logits keeps"),
        (of_two_windows, "keeps other tokens than another slice"),
        (written_among, "writes some tokens among others"),
        (not_zero_outside, "reads more tokens than a slice of the logits keeps"),
        (at_a_size, "slices at places that are not known"),
        (with_unknown_tokens, "has a number of tokens that is not known before it runs"),
        (turned_around, "puts sequence before batch"),
        (summed_up, "is not known to treat every token by itself"),
        (parts, "makes several tensors"),
        (by_position, "takes batch and sequence apart"),
        (repeated, "repeats tokens"),
        (with_four_others, "repeats tokens"),
        (repeated_before_it_is_shifted, "repeats tokens"),
    ],
)
def test_the_reason_why_logits_have_to_be_untiled(use: Callable[[Builder, fx.Node], fx.Node], why: str) -> None:
    b = Builder()
    logits = head(b)
    b.output(use(b, logits))
    with pytest.raises(Mixes, match=why):
        region_of(logits)
