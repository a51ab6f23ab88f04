"""One marker per parameter, one reduction per gradient."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from graphs import Builder, show
from torch.fx.experimental.proxy_tensor import make_fx

from zerograph.passes import canonicalize

aten = torch.ops.aten


def test_two_markers_of_one_shard_become_one() -> None:
    b = Builder()
    x, shard = b.input("x", 4, 4), b.input("w_shard", 2, 4)
    first = b.unshard(shard, "w", (4, 4))
    h = b.mm(x, first)
    again = b.unshard(b.call(aten.alias.default, shard), "w", (4, 4))
    gm = b.output(b.mm(h, again))
    assert canonicalize(gm) == 1
    assert_expected_inline(
        show(gm),
        """\
w_full = unshard(w_shard, w)
mm_default = mm(x, w_full)
mm_default_1 = mm(mm_default, w_full)
return [mm_default_1]""",
    )


def test_three_uses_are_summed_before_one_reduction() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    (w,) = b.params("w")
    reduced = [b.reduce_grad(b.mm(g, b.call(aten.mul.Tensor, w, k)), w) for k in (1.0, 2.0, 3.0)]
    total = b.call(aten.add.Tensor, b.call(aten.add.Tensor, reduced[1], reduced[0]), reduced[2])
    gm = b.output(b.call(aten.alias.default, total))
    assert canonicalize(gm) == 2
    assert_expected_inline(
        show(gm),
        """\
w_full = unshard(w_shard, w)
mul_tensor = mul(w_full, 1.0)
mm_default = mm(g, mul_tensor)
mul_tensor_1 = mul(w_full, 2.0)
mm_default_1 = mm(g, mul_tensor_1)
mul_tensor_2 = mul(w_full, 3.0)
mm_default_2 = mm(g, mul_tensor_2)
add_tensor_2 = add(mm_default, mm_default_1)
add_tensor_3 = add(add_tensor_2, mm_default_2)
reduce_grad_default_3 = reduce_grad(add_tensor_3, w)
return [reduce_grad_default_3]""",
    )


def test_gradients_of_different_parameters_stay_separate() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    v, w = b.params("v", "w")
    gm = b.output(b.reduce_grad(b.mm(g, v), v), b.reduce_grad(b.mm(g, w), w))
    before = show(gm).replace("reduce_grad_default", "reduce_grad")
    assert canonicalize(gm) == 0
    assert show(gm).count(" = reduce_grad(") == before.count(" = reduce_grad(") == 2


def test_a_sum_that_takes_one_gradient_twice_is_left_alone() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    (w,) = b.params("w")
    one, two = (b.reduce_grad(b.mm(g, w), w) for _ in range(2))
    gm = b.output(b.call(aten.add.Tensor, b.call(aten.add.Tensor, one, two), one))
    before = show(gm)
    assert canonicalize(gm) == 0
    assert show(gm) == before


def test_a_constant_added_to_a_gradient_is_no_part_of_the_sum() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    (w,) = b.params("w")
    reduced = b.reduce_grad(b.mm(g, w), w)
    gm = b.output(b.call(aten.add.Tensor, reduced, 1.0))
    canonicalize(gm)
    assert_expected_inline(
        show(gm),
        """\
w_full = unshard(w_shard, w)
mm_default = mm(g, w_full)
reduce_grad_default_1 = reduce_grad(mm_default, w)
add_tensor = add(reduce_grad_default_1, 1.0)
return [add_tensor]""",
    )


def test_a_returned_parameter_is_copied() -> None:
    b = Builder()
    (w,) = b.params("w")
    gm = b.output(b.call(aten.t.default, w))
    canonicalize(gm)
    assert_expected_inline(
        show(gm),
        """\
w_full = unshard(w_shard, w)
t_default = t(w_full)
clone_default = clone(t_default)
return [clone_default]""",
    )


def test_without_markers_nothing_happens() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    gm = b.output(b.mm(x, x))
    before = show(gm)
    assert canonicalize(gm) == 0
    assert show(gm) == before


def test_what_is_stacked_has_a_dimension_of_its_own() -> None:
    b = Builder()
    parts = [b.input(name, 2, 4) for name in "ab"]
    stacked = b.call(aten.view.default, b.call(aten.cat.default, parts, 0), [2, 2, 4])
    gm = b.output(b.call(aten.neg.default, stacked))
    canonicalize(gm)
    assert_expected_inline(
        show(gm),
        """\
unsqueeze_default = unsqueeze(a, 0)
unsqueeze_default_1 = unsqueeze(b, 0)
cat_default_1 = cat([unsqueeze_default, unsqueeze_default_1], 0)
neg_default = neg(cat_default_1)
return [neg_default]""",
    )


def test_what_is_joined_and_viewed_otherwise_stays_so() -> None:
    b = Builder()
    joined = b.call(aten.cat.default, [b.input("a", 2, 4), b.input("b", 2, 4)], 0)
    gm = b.output(b.call(aten.view.default, joined, [4, 2, 2]))
    before = show(gm)
    canonicalize(gm)
    assert show(gm) == before


def test_open_sizes_of_what_is_put_together_stay_open() -> None:
    """Two numbers of routed tokens, which nothing says are alike."""
    made = make_fx(lambda x, y: torch.cat([x, y]).view(-1), tracing_mode="symbolic")
    gm = made(torch.ones(6, 4), torch.ones(5, 4))
    assumed = len(gm.shape_env.guards)
    canonicalize(gm)
    assert len(gm.shape_env.guards) == assumed
