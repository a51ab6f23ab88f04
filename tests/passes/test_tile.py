"""Parameters that are used in tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.core.errors import ConfigError
from zerograph.core.plan import Plan, tile_params
from zerograph.graph.nodes import TileFact, call, markers
from zerograph.graph.ops import ACCUMULATE, GATHER, UNSHARD
from zerograph.passes import gather, reduce, tile, verify

aten = torch.ops.aten


def in_tiles(gm: fx.GraphModule, tiles: int = 2, **options: Any) -> Plan:
    """A plan with ``w`` in tiles, and a bucket for ``b`` where the graph has it."""
    others = [m.name for m in markers(gm.graph, UNSHARD) if m.name != "w"]
    found = plan(gm, "w", *others, **options)
    return replace(found, buckets=(replace(found.buckets[0], tiles=tiles), *found.buckets[1:]))


def forward(rows: int, world_size: int = 2, bias: bool = False) -> fx.GraphModule:
    b = Builder(world_size)
    x = b.input("x", 3, 4)
    (w,) = b.params("w", shape=(rows, 4))
    added = b.params("b", shape=(rows,)) if bias else []
    turned = b.call(aten.permute.default, w, [1, 0])
    return b.output(b.call(aten.addmm.default, *added, x, turned) if bias else b.mm(x, turned))


def test_columns_of_each_tile_are_placed_beside_those_of_the_other_ranks() -> None:
    gm = forward(8)
    p = in_tiles(gm)
    assert tile(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
unshard_default = unshard(w_shard, w)
permute_default_1 = permute(unshard_default, [1, 0])
mm_default_1 = mm(x, permute_default_1)
view_default = view(mm_default_1, [3, 2, 2])
place_default = place([view_default], None, [-1, 2, 4], 2, 0)
unshard_default_1 = unshard(w_shard, w)
permute_default_2 = permute(unshard_default_1, [1, 0])
mm_default_2 = mm(x, permute_default_2)
view_default_1 = view(mm_default_2, [3, 2, 2])
place_default_1 = place([view_default_1], place_default, [-1, 2, 4], 2, 2)
view_default_2 = view(place_default_1, [3, 8])
return [view_default_2]""",
    )
    assert [m.tile for m in markers(gm.graph, UNSHARD)] == [
        TileFact(i, param) for i, param in enumerate(tile_params(p.buckets[0].params[0], 2))
    ]


def test_a_tile_is_gathered_as_a_bucket() -> None:
    gm = forward(8)
    p = in_tiles(gm)
    tile(gm, p)
    assert gather(gm, p) == 2
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([w_shard], 0, 0)
wait_gather_default = wait_gather(gather_default, [w_shard], 0, 0)
getitem = getitem(wait_gather_default, 0)
permute_default_3 = permute(getitem, [1, 0])
mm_default_1 = mm(x, permute_default_3)
view_default = view(mm_default_1, [3, 2, 2])
place_default = place([view_default], None, [-1, 2, 4], 2, 0)
free_default = free([getitem], 0, 0)
gather_default_1 = gather([w_shard], 0, 1)
wait_gather_default_1 = wait_gather(gather_default_1, [w_shard], 0, 1)
getitem_1 = getitem(wait_gather_default_1, 0)
permute_default_4 = permute(getitem_1, [1, 0])
mm_default_2 = mm(x, permute_default_4)
view_default_1 = view(mm_default_2, [3, 2, 2])
place_default_1 = place([view_default_1], place_default, [-1, 2, 4], 2, 2)
view_default_2 = view(place_default_1, [3, 8])
free_default_1 = free([getitem_1], 0, 1)
return [view_default_2]""",
    )


def test_rows_that_do_not_divide_are_padded_and_cut_off() -> None:
    gm = forward(7, bias=True)
    assert tile(gm, in_tiles(gm)) == 2
    assert_expected_inline(
        show(gm),
        """\
b_full = unshard(b_shard, b)
constant_pad_nd_default = constant_pad_nd(b_full, [0, 1])
view_default = view(constant_pad_nd_default, [2, 4])
unshard_default = unshard(w_shard, w)
view_default_1 = view(view_default, 1, 0, 2)
clone_default = clone(view_default_1, torch.contiguous_format)
view_default_2 = view(clone_default, [4])
permute_default_1 = permute(unshard_default, [1, 0])
addmm_default_1 = addmm(view_default_2, x, permute_default_1)
view_default_3 = view(addmm_default_1, [3, 2, 2])
place_default = place([view_default_3], None, [-1, 2, 4], 2, 0)
unshard_default_1 = unshard(w_shard, w)
view_default_4 = view(view_default, 1, 2, 4)
clone_default_1 = clone(view_default_4, torch.contiguous_format)
view_default_5 = view(clone_default_1, [4])
permute_default_2 = permute(unshard_default_1, [1, 0])
addmm_default_2 = addmm(view_default_5, x, permute_default_2)
view_default_6 = view(addmm_default_2, [3, 2, 2])
place_default_1 = place([view_default_6], place_default, [-1, 2, 4], 2, 2)
view_default_7 = view(place_default_1, [3, 8])
slice_tensor = slice(view_default_7, 1, 0, 7)
clone_default_2 = clone(slice_tensor, torch.contiguous_format)
return [clone_default_2]""",
    )


def test_a_tile_that_is_used_again_while_it_is_unsharded_is_gathered_once() -> None:
    b = Builder()
    x = b.input("x", 3, 4)
    (w,) = b.params("w", shape=(4, 4))
    turned = b.call(aten.permute.default, w, [1, 0])
    gm = b.output(b.mm(b.mm(x, turned), turned))
    p = in_tiles(gm, prefetch=3)
    assert tile(gm, p) == 4
    assert gather(gm, p) == 2
    verify(gm, p)
    assert [len(node.args[0]) for node in gm.graph.find_nodes(op="call_function", target=GATHER)] == [1, 1]


def test_a_lone_rank_has_nothing_beside_its_own() -> None:
    gm = forward(7, world_size=1, bias=True)
    assert tile(gm, in_tiles(gm, world_size=1)) == 2
    assert_expected_inline(
        show(gm),
        """\
b_full = unshard(b_shard, b)
clone_default = clone(b_full, torch.contiguous_format)
unshard_default = unshard(w_shard, w)
view_default = view(clone_default, 0, 0, 3)
permute_default_1 = permute(unshard_default, [1, 0])
addmm_default_1 = addmm(view_default, x, permute_default_1)
place_default = place([addmm_default_1], None, [-1, 7], 1, 0)
unshard_default_1 = unshard(w_shard, w)
view_default_1 = view(clone_default, 0, 3, 7)
permute_default_2 = permute(unshard_default_1, [1, 0])
addmm_default_2 = addmm(view_default_1, x, permute_default_2)
place_default_1 = place([addmm_default_2], place_default, [-1, 7], 1, 3)
return [place_default_1]""",
    )


def rows_in(dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    b = Builder()
    x = b.input("x", 3, 7, dtype=dtype)
    (w,), (bias,) = b.params("w", shape=(7, 4), dtype=dtype), b.params("b", shape=(4,), dtype=dtype)
    return b.output(b.call(aten.addmm.default, bias, x, w))


def test_terms_of_rows_that_are_inputs_are_added_up_and_the_bias_once() -> None:
    gm = rows_in()
    assert tile(gm, in_tiles(gm)) == 2
    assert_expected_inline(
        show(gm),
        """\
b_full = unshard(b_shard, b)
constant_pad_nd_default = constant_pad_nd(x, [0, 1])
view_default = view(constant_pad_nd_default, [3, 2, 4])
unshard_default = unshard(w_shard, w)
view_default_1 = view(view_default, 2, 0, 2)
clone_default = clone(view_default_1, torch.contiguous_format)
view_default_2 = view(clone_default, [3, 4])
accumulate_default = accumulate([view_default_2, unshard_default], None)
unshard_default_1 = unshard(w_shard, w)
view_default_3 = view(view_default, 2, 2, 4)
clone_default_1 = clone(view_default_3, torch.contiguous_format)
view_default_4 = view(clone_default_1, [3, 4])
accumulate_default_1 = accumulate([view_default_4, unshard_default_1], accumulate_default)
add_tensor = add(accumulate_default_1, b_full)
return [add_tensor]""",
    )


def lookup(dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    b = Builder()
    ids = b.input("ids", 3, dtype=torch.int64)
    (w,) = b.params("w", shape=(7, 4), dtype=dtype)
    return b.output(b.call(aten.embedding.default, w, ids))


def test_a_row_is_looked_up_in_each_tile_and_found_in_one() -> None:
    gm = lookup()
    assert tile(gm, in_tiles(gm)) == 2
    assert_expected_inline(
        show(gm),
        """\
iota_default = iota(7, 0, 1, torch.int64, cpu, False)
unsqueeze_default = unsqueeze(iota_default, 1)
embedding_default_1 = embedding(unsqueeze_default, ids)
squeeze_dim = squeeze.dim(embedding_default_1, -1)
div_tensor_mode = div.Tensor_mode(squeeze_dim, 4, floor)
mul_tensor = mul(div_tensor_mode, 4)
sub_tensor = sub(squeeze_dim, mul_tensor)
iota_default_1 = iota(4, 0, 1, torch.int64, cpu, False)
unshard_default = unshard(w_shard, w)
view_default = view(iota_default_1, 0, 0, 1)
sub_tensor_1 = sub(sub_tensor, view_default)
ge_scalar = ge.Scalar(sub_tensor_1, 0)
lt_scalar = lt.Scalar(sub_tensor_1, 2)
bitwise_and_tensor = bitwise_and(ge_scalar, lt_scalar)
mul_tensor_1 = mul(div_tensor_mode, 2)
add_tensor = add(mul_tensor_1, sub_tensor_1)
unsqueeze_default_1 = unsqueeze(bitwise_and_tensor, -1)
_unsafe_masked_index_default = _unsafe_masked_index(unshard_default, unsqueeze_default_1, [add_tensor], 0)
accumulate_default = accumulate([_unsafe_masked_index_default], None)
unshard_default_1 = unshard(w_shard, w)
view_default_1 = view(iota_default_1, 0, 2, 3)
sub_tensor_2 = sub(sub_tensor, view_default_1)
ge_scalar_1 = ge.Scalar(sub_tensor_2, 0)
lt_scalar_1 = lt.Scalar(sub_tensor_2, 2)
bitwise_and_tensor_1 = bitwise_and(ge_scalar_1, lt_scalar_1)
mul_tensor_2 = mul(div_tensor_mode, 2)
add_tensor_1 = add(mul_tensor_2, sub_tensor_2)
unsqueeze_default_2 = unsqueeze(bitwise_and_tensor_1, -1)
_unsafe_masked_index_default_1 = _unsafe_masked_index(unshard_default_1, unsqueeze_default_2, [add_tensor_1], 0)
accumulate_default_1 = accumulate([_unsafe_masked_index_default_1], accumulate_default)
return [accumulate_default_1]""",
    )


def test_rows_of_a_lookups_gradient_are_added_up_by_tile() -> None:
    b = Builder()
    ids, grad = b.input("ids", 3, dtype=torch.int64), b.input("grad", 3, 4)
    mask = b.input("mask", 3, 1, dtype=torch.bool)
    (w,) = b.params("w", shape=(7, 4))
    zeros = b.call(aten.full.default, [7, 4], 0)
    rows = b.call(aten._unsafe_masked_index_put_accumulate.default, zeros, mask, [ids], grad)
    gm = b.output(b.reduce_grad(rows, w))
    assert tile(gm, in_tiles(gm)) == 2
    assert_expected_inline(
        show(gm),
        """\
div_tensor_mode = div.Tensor_mode(ids, 4, floor)
mul_tensor = mul(div_tensor_mode, 4)
sub_tensor = sub(ids, mul_tensor)
iota_default = iota(4, 0, 1, torch.int64, cpu, False)
view_default = view(iota_default, 0, 0, 1)
sub_tensor_1 = sub(sub_tensor, view_default)
ge_scalar = ge.Scalar(sub_tensor_1, 0)
lt_scalar = lt.Scalar(sub_tensor_1, 2)
bitwise_and_tensor = bitwise_and(ge_scalar, lt_scalar)
mul_tensor_1 = mul(div_tensor_mode, 2)
add_tensor = add(mul_tensor_1, sub_tensor_1)
unsqueeze_default = unsqueeze(bitwise_and_tensor, -1)
bitwise_and_tensor_1 = bitwise_and(mask, unsqueeze_default)
full_default_1 = full([4, 4], 0)
_unsafe_masked_index_put_accumulate_default_1 = _unsafe_masked_index_put_accumulate(full_default_1, bitwise_and_tensor_1, [add_tensor], grad)
reduce_grad_default_1 = reduce_grad(_unsafe_masked_index_put_accumulate_default_1, w)
place_default = place([reduce_grad_default_1], None, [4, 4], 0, 0)
view_default_1 = view(iota_default, 0, 2, 3)
sub_tensor_2 = sub(sub_tensor, view_default_1)
ge_scalar_1 = ge.Scalar(sub_tensor_2, 0)
lt_scalar_1 = lt.Scalar(sub_tensor_2, 2)
bitwise_and_tensor_2 = bitwise_and(ge_scalar_1, lt_scalar_1)
mul_tensor_2 = mul(div_tensor_mode, 2)
add_tensor_1 = add(mul_tensor_2, sub_tensor_2)
unsqueeze_default_1 = unsqueeze(bitwise_and_tensor_2, -1)
bitwise_and_tensor_3 = bitwise_and(mask, unsqueeze_default_1)
full_default_2 = full([4, 4], 0)
_unsafe_masked_index_put_accumulate_default_2 = _unsafe_masked_index_put_accumulate(full_default_2, bitwise_and_tensor_3, [add_tensor_1], grad)
reduce_grad_default_2 = reduce_grad(_unsafe_masked_index_put_accumulate_default_2, w)
place_default_1 = place([reduce_grad_default_2], place_default, [4, 4], 0, 2)
return [place_default_1]""",  # noqa: E501
    )


def backward(dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    b = Builder()
    x, grad = b.input("x", 3, 4, dtype=dtype), b.input("grad", 3, 7, dtype=dtype)
    (w,) = b.params("w", shape=(7, 4), dtype=dtype)
    one = b.mm(grad, w)
    both = b.call(aten.add.Tensor, b.mm(b.call(aten.permute.default, grad, [1, 0]), x), _transposed(b, x, grad))
    return b.output(one, b.reduce_grad(both, w))


def _transposed(b: Builder, x: fx.Node, grad: fx.Node) -> fx.Node:
    return b.call(aten.permute.default, b.mm(b.call(aten.permute.default, x, [1, 0]), grad), [1, 0])


def test_gradients_of_inputs_are_added_up_and_those_of_parameters_reduced_by_tile() -> None:
    gm = backward()
    p = in_tiles(gm)
    assert tile(gm, p) == 4
    assert_expected_inline(
        show(gm),
        """\
constant_pad_nd_default = constant_pad_nd(grad, [0, 1])
view_default = view(constant_pad_nd_default, [3, 2, 4])
unshard_default = unshard(w_shard, w)
view_default_1 = view(view_default, 2, 0, 2)
clone_default = clone(view_default_1, torch.contiguous_format)
view_default_2 = view(clone_default, [3, 4])
accumulate_default = accumulate([view_default_2, unshard_default], None)
unshard_default_1 = unshard(w_shard, w)
view_default_3 = view(view_default, 2, 2, 4)
clone_default_1 = clone(view_default_3, torch.contiguous_format)
view_default_4 = view(clone_default_1, [3, 4])
accumulate_default_1 = accumulate([view_default_4, unshard_default_1], accumulate_default)
permute_default_1 = permute(x, [1, 0])
constant_pad_nd_default_1 = constant_pad_nd(grad, [0, 1])
view_default_5 = view(constant_pad_nd_default_1, [3, 2, 4])
constant_pad_nd_default_2 = constant_pad_nd(grad, [0, 1])
view_default_6 = view(constant_pad_nd_default_2, [3, 2, 4])
view_default_7 = view(view_default_5, 2, 0, 2)
clone_default_2 = clone(view_default_7, torch.contiguous_format)
view_default_8 = view(clone_default_2, [3, 4])
permute_default_3 = permute(view_default_8, [1, 0])
mm_default_3 = mm(permute_default_3, x)
view_default_9 = view(view_default_6, 2, 0, 2)
clone_default_3 = clone(view_default_9, torch.contiguous_format)
view_default_10 = view(clone_default_3, [3, 4])
mm_default_4 = mm(permute_default_1, view_default_10)
permute_default_4 = permute(mm_default_4, [1, 0])
add_tensor_1 = add(mm_default_3, permute_default_4)
reduce_grad_default_1 = reduce_grad(add_tensor_1, w)
place_default = place([reduce_grad_default_1], None, [4, 4], 0, 0)
view_default_11 = view(view_default_5, 2, 2, 4)
clone_default_4 = clone(view_default_11, torch.contiguous_format)
view_default_12 = view(clone_default_4, [3, 4])
permute_default_5 = permute(view_default_12, [1, 0])
mm_default_5 = mm(permute_default_5, x)
view_default_13 = view(view_default_6, 2, 2, 4)
clone_default_5 = clone(view_default_13, torch.contiguous_format)
view_default_14 = view(clone_default_5, [3, 4])
mm_default_6 = mm(permute_default_1, view_default_14)
permute_default_6 = permute(mm_default_6, [1, 0])
add_tensor_2 = add(mm_default_5, permute_default_6)
reduce_grad_default_2 = reduce_grad(add_tensor_2, w)
place_default_1 = place([reduce_grad_default_2], place_default, [4, 4], 0, 2)
return [accumulate_default_1, place_default_1]""",
    )
    gather(gm, p)
    assert reduce(gm, p) == 2
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
constant_pad_nd_default = constant_pad_nd(grad, [0, 1])
view_default = view(constant_pad_nd_default, [3, 2, 4])
view_default_1 = view(view_default, 2, 0, 2)
clone_default = clone(view_default_1, torch.contiguous_format)
view_default_2 = view(clone_default, [3, 4])
gather_default = gather([w_shard], 0, 0)
wait_gather_default = wait_gather(gather_default, [w_shard], 0, 0)
getitem = getitem(wait_gather_default, 0)
accumulate_default = accumulate([view_default_2, getitem], None)
view_default_3 = view(view_default, 2, 2, 4)
clone_default_1 = clone(view_default_3, torch.contiguous_format)
view_default_4 = view(clone_default_1, [3, 4])
free_default = free([getitem], 0, 0)
gather_default_1 = gather([w_shard], 0, 1)
wait_gather_default_1 = wait_gather(gather_default_1, [w_shard], 0, 1)
getitem_1 = getitem(wait_gather_default_1, 0)
accumulate_default_1 = accumulate([view_default_4, getitem_1], accumulate_default)
permute_default_1 = permute(x, [1, 0])
constant_pad_nd_default_1 = constant_pad_nd(grad, [0, 1])
view_default_5 = view(constant_pad_nd_default_1, [3, 2, 4])
constant_pad_nd_default_2 = constant_pad_nd(grad, [0, 1])
view_default_6 = view(constant_pad_nd_default_2, [3, 2, 4])
view_default_7 = view(view_default_5, 2, 0, 2)
clone_default_2 = clone(view_default_7, torch.contiguous_format)
view_default_8 = view(clone_default_2, [3, 4])
permute_default_3 = permute(view_default_8, [1, 0])
mm_default_3 = mm(permute_default_3, x)
view_default_9 = view(view_default_6, 2, 0, 2)
clone_default_3 = clone(view_default_9, torch.contiguous_format)
view_default_10 = view(clone_default_3, [3, 4])
mm_default_4 = mm(permute_default_1, view_default_10)
permute_default_4 = permute(mm_default_4, [1, 0])
add_tensor_1 = add(mm_default_3, permute_default_4)
reduce_default = reduce([add_tensor_1], 0, 0)
view_default_11 = view(view_default_5, 2, 2, 4)
clone_default_4 = clone(view_default_11, torch.contiguous_format)
view_default_12 = view(clone_default_4, [3, 4])
permute_default_5 = permute(view_default_12, [1, 0])
mm_default_5 = mm(permute_default_5, x)
view_default_13 = view(view_default_6, 2, 2, 4)
clone_default_5 = clone(view_default_13, torch.contiguous_format)
view_default_14 = view(clone_default_5, [3, 4])
mm_default_6 = mm(permute_default_1, view_default_14)
permute_default_6 = permute(mm_default_6, [1, 0])
add_tensor_2 = add(mm_default_5, permute_default_6)
wait_reduce_default = wait_reduce(reduce_default, [add_tensor_1], 0, 0)
getitem_2 = getitem(wait_reduce_default, 0)
place_default = place([getitem_2], None, [4, 4], 0, 0)
reduce_default_1 = reduce([add_tensor_2], 0, 1)
free_default_1 = free([getitem_1], 0, 1)
wait_reduce_default_1 = wait_reduce(reduce_default_1, [add_tensor_2], 0, 1)
getitem_3 = getitem(wait_reduce_default_1, 0)
place_default_1 = place([getitem_3], place_default, [4, 4], 0, 2)
return [accumulate_default_1, place_default_1]""",
    )


def test_a_tile_is_cast_as_the_weight_is() -> None:
    b = Builder()
    x = b.input("x", 3, 4, dtype=torch.bfloat16)
    (w,) = b.params("w", shape=(8, 4))
    cast = b.call(torch.ops.prims.convert_element_type.default, w, torch.bfloat16)
    gm = b.output(b.mm(x, b.call(aten.permute.default, cast, [1, 0])))
    assert tile(gm, in_tiles(gm)) == 2
    assert_expected_inline(
        show(gm),
        """\
unshard_default = unshard(w_shard, w)
convert_element_type_default_1 = convert_element_type(unshard_default, torch.bfloat16)
permute_default_1 = permute(convert_element_type_default_1, [1, 0])
mm_default_1 = mm(x, permute_default_1)
view_default = view(mm_default_1, [3, 2, 2])
place_default = place([view_default], None, [-1, 2, 4], 2, 0)
unshard_default_1 = unshard(w_shard, w)
convert_element_type_default_2 = convert_element_type(unshard_default_1, torch.bfloat16)
permute_default_2 = permute(convert_element_type_default_2, [1, 0])
mm_default_2 = mm(x, permute_default_2)
view_default_1 = view(mm_default_2, [3, 2, 2])
place_default_1 = place([view_default_1], place_default, [-1, 2, 4], 2, 2)
view_default_2 = view(place_default_1, [3, 8])
return [view_default_2]""",
    )


def test_tiles_of_tokens_reduce_a_tile_of_the_gradient_each() -> None:
    b = Builder()
    (w,), total = b.params("w", shape=(8, 4)), None
    for tile_of_tokens in "ab":
        x, grad = b.input(f"x_{tile_of_tokens}", 3, 4), b.input(f"grad_{tile_of_tokens}", 3, 8)
        terms = [b.call(aten.permute.default, grad, [1, 0]), x]
        total = call(b.graph, ACCUMULATE, (terms, total), w.meta["val"].new_empty(8, 4), x)
    gm = b.output(b.reduce_grad(total, w))
    p = in_tiles(gm)
    assert tile(gm, p) == 4
    assert_expected_inline(
        show(gm),
        """\
view_default = view(grad_a, [3, 2, 4])
view_default_1 = view(view_default, 2, 0, 2)
clone_default = clone(view_default_1, torch.contiguous_format)
view_default_2 = view(clone_default, [3, 4])
permute_default_2 = permute(view_default_2, [1, 0])
mm_default = mm(permute_default_2, x_a)
reduce_grad_default_1 = reduce_grad(mm_default, w)
accumulate_default_2 = accumulate([reduce_grad_default_1], None)
view_default_3 = view(view_default, 2, 2, 4)
clone_default_1 = clone(view_default_3, torch.contiguous_format)
view_default_4 = view(clone_default_1, [3, 4])
permute_default_3 = permute(view_default_4, [1, 0])
mm_default_1 = mm(permute_default_3, x_a)
reduce_grad_default_2 = reduce_grad(mm_default_1, w)
accumulate_default_3 = accumulate([reduce_grad_default_2], None)
view_default_5 = view(grad_b, [3, 2, 4])
view_default_6 = view(view_default_5, 2, 0, 2)
clone_default_2 = clone(view_default_6, torch.contiguous_format)
view_default_7 = view(clone_default_2, [3, 4])
permute_default_4 = permute(view_default_7, [1, 0])
mm_default_2 = mm(permute_default_4, x_b)
reduce_grad_default_3 = reduce_grad(mm_default_2, w)
accumulate_default_4 = accumulate([reduce_grad_default_3], accumulate_default_2)
view_default_8 = view(view_default_5, 2, 2, 4)
clone_default_3 = clone(view_default_8, torch.contiguous_format)
view_default_9 = view(clone_default_3, [3, 4])
permute_default_5 = permute(view_default_9, [1, 0])
mm_default_3 = mm(permute_default_5, x_b)
reduce_grad_default_4 = reduce_grad(mm_default_3, w)
accumulate_default_5 = accumulate([reduce_grad_default_4], accumulate_default_3)
place_default = place([accumulate_default_4], None, [4, 4], 0, 0)
place_default_1 = place([accumulate_default_5], place_default, [4, 4], 0, 2)
return [place_default_1]""",
    )
    assert reduce(gm, p) == 4
    verify(gm, p)


@pytest.mark.parametrize("made", [backward, rows_in, lookup])
def test_sums_of_16_bits_are_rounded_once(made: Callable[[torch.dtype], fx.GraphModule]) -> None:
    gm = made(torch.bfloat16)
    tile(gm, in_tiles(gm))
    sums = gm.graph.find_nodes(op="call_function", target=torch.ops.zg.accumulate.default)
    assert {node.meta["val"].dtype for node in sums} == {torch.float32}
    result, *_ = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    assert result.target is torch.ops.prims.convert_element_type.default
    assert result.args[0].meta["val"].dtype == torch.float32
    assert result.meta["val"].dtype == torch.bfloat16


def test_what_needs_an_unsharded_parameter_is_named() -> None:
    b = Builder()
    (w,) = b.params("w", shape=(8, 4))
    gm = b.output(b.call(aten.mm.default, b.input("x", 3, 8), w), b.call(aten.sum.default, w))
    with pytest.raises(ConfigError, match=r"w is planned in 2 tiles, and aten.sum.default needs it whole"):
        tile(gm, in_tiles(gm))
    b = Builder()
    (w,) = b.params("w", shape=(8, 4))
    gm = b.output(b.reduce_grad(b.call(aten.neg.default, b.input("grad", 8, 4)), w))
    with pytest.raises(ConfigError, match=r"w is planned in 2 tiles, and aten.neg.default needs it whole"):
        tile(gm, in_tiles(gm))


def test_what_is_not_in_tiles_stays_as_it_is() -> None:
    gm = forward(8)
    before = show(gm)
    assert tile(gm, plan(gm, "w")) == 0
    assert show(gm) == before
