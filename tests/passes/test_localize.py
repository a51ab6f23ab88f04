"""Markers of parameters that every rank holds whole turn into casts, or into nothing."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from graphs import Builder, show

from zerograph.passes import localize

aten = torch.ops.aten


def test_an_unsharded_parameter_needs_no_gather() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (scale,) = b.params("scale", shape=(1, 4), sharded=False)
    (w,) = b.params("w")
    gm = b.output(b.call(aten.mul.Tensor, b.mm(x, w), scale))
    assert localize(gm) == 1
    assert_expected_inline(
        show(gm),
        """\
w_full = unshard(w_shard, w)
mm_default = mm(x, w_full)
mul_tensor = mul(mm_default, scale_shard)
return [mul_tensor]""",
    )


def test_a_compute_dtype_becomes_a_cast() -> None:
    b = Builder(world_size=1)
    x = b.input("x", 4, 4, dtype=torch.bfloat16)
    (w,) = b.params("w", group="", sharded=False, dtype=torch.bfloat16)
    grad = b.reduce_grad(b.mm(x, w), w)
    gm = b.output(grad)
    assert localize(gm) == 2
    assert_expected_inline(
        show(gm),
        """\
convert_element_type_default = convert_element_type(w_shard, torch.bfloat16)
mm_default = mm(x, convert_element_type_default)
convert_element_type_default_1 = convert_element_type(mm_default, torch.float32)
return [convert_element_type_default_1]""",
    )


def test_over_several_ranks_the_reduction_of_an_unsharded_parameter_stays() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    (w,) = b.params("w", sharded=False)
    gm = b.output(b.reduce_grad(b.mm(g, w), w))
    assert localize(gm) == 1
    assert_expected_inline(
        show(gm),
        """\
mm_default = mm(g, w_shard)
reduce_grad_default = reduce_grad(mm_default, w)
return [reduce_grad_default]""",
    )


def test_a_scalar_parameter() -> None:
    b = Builder()
    x, shard = b.input("x", 4), b.input("s_shard")
    s = b.unshard(shard, "s", (), sharded=False)
    gm = b.output(b.call(aten.mul.Tensor, x, s))
    assert localize(gm) == 1
    assert_expected_inline(
        show(gm),
        """\
mul_tensor = mul(x, s_shard)
return [mul_tensor]""",
    )


def test_sharded_parameters_are_left_alone() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    gm = b.output(b.mm(x, w))
    before = show(gm)
    assert localize(gm) == 0
    assert show(gm) == before
