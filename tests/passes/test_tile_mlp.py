"""MLPs that run in one loop over their hidden dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.core.plan import Plan, tile_params
from zerograph.graph.nodes import TileFact, markers
from zerograph.graph.ops import UNSHARD
from zerograph.passes import gather, reduce, tile, tile_mlp, verify

aten = torch.ops.aten
DIMS = {"up": 0, "down": 1}


def in_a_loop(gm: fx.GraphModule, tiles: int = 2, **options: Any) -> Plan:
    """A plan with ``up`` and ``down`` in one loop, and buckets for all others."""
    names = [m.name for m in markers(gm.graph, UNSHARD)]
    found = plan(gm, *names, **options)
    buckets = (replace(b, tiles=tiles, dim=DIMS[b.name], loop="mlp") if b.name in DIMS else b for b in found.buckets)
    return replace(found, buckets=tuple(buckets))


def mlp(hidden: int = 8, world_size: int = 2) -> tuple[Builder, fx.Node, fx.Node, fx.Node, fx.Node]:
    """``relu(x @ up.T) @ down.T``: the builder, the markers, the input and the middle."""
    b = Builder(world_size)
    x = b.input("x", 3, 4)
    (up,) = b.params("up", shape=(hidden, 4))
    (down,) = b.params("down", shape=(4, hidden))
    middle = b.call(aten.relu.default, b.mm(x, b.call(aten.permute.default, up, [1, 0])))
    return b, up, down, x, middle


def forward(hidden: int = 8) -> fx.GraphModule:
    b, _, down, _, middle = mlp(hidden)
    return b.output(b.mm(middle, b.call(aten.permute.default, down, [1, 0])))


def test_a_tile_makes_its_part_of_the_middle_and_a_term() -> None:
    gm = forward()
    p = in_a_loop(gm)
    assert tile_mlp(gm, p) == 2
    assert tile(gm, p) == 0
    assert_expected_inline(
        show(gm),
        """\
unshard_default = unshard(up_shard, up)
permute_default_2 = permute(unshard_default, [1, 0])
unshard_default_1 = unshard(down_shard, down)
permute_default_3 = permute(unshard_default_1, [1, 0])
mm_default_2 = mm(x, permute_default_2)
relu_default_1 = relu(mm_default_2)
accumulate_default = accumulate([relu_default_1, permute_default_3], None)
unshard_default_2 = unshard(up_shard, up)
permute_default_4 = permute(unshard_default_2, [1, 0])
unshard_default_3 = unshard(down_shard, down)
permute_default_5 = permute(unshard_default_3, [1, 0])
mm_default_3 = mm(x, permute_default_4)
relu_default_2 = relu(mm_default_3)
accumulate_default_1 = accumulate([relu_default_2, permute_default_5], accumulate_default)
return [accumulate_default_1]""",
    )
    tiles = [tile_params(bucket.params[0], 2, 2, bucket.dim) for bucket in p.buckets]
    assert [m.tile for m in markers(gm.graph, UNSHARD)] == [TileFact(i, own[i]) for i in range(2) for own in tiles]


def test_tiles_are_gathered_one_after_another() -> None:
    gm = forward()
    p = in_a_loop(gm)
    tile_mlp(gm, p)
    assert gather(gm, p) == 4
    verify(gm, p)


def test_what_pads_the_last_shards_is_cut_off_before_it_is_read() -> None:
    gm = forward(7)
    assert tile_mlp(gm, in_a_loop(gm)) == 2
    assert_expected_inline(
        show(gm),
        """\
unshard_default = unshard(up_shard, up)
permute_default_2 = permute(unshard_default, [1, 0])
unshard_default_1 = unshard(down_shard, down)
permute_default_3 = permute(unshard_default_1, [1, 0])
mm_default_2 = mm(x, permute_default_2)
relu_default_1 = relu(mm_default_2)
accumulate_default = accumulate([relu_default_1, permute_default_3], None)
unshard_default_2 = unshard(up_shard, up)
slice_tensor = slice(unshard_default_2, 0, 0, 3)
permute_default_4 = permute(slice_tensor, [1, 0])
unshard_default_3 = unshard(down_shard, down)
slice_tensor_1 = slice(unshard_default_3, 1, 0, 3)
permute_default_5 = permute(slice_tensor_1, [1, 0])
mm_default_3 = mm(x, permute_default_4)
relu_default_2 = relu(mm_default_3)
accumulate_default_1 = accumulate([relu_default_2, permute_default_5], accumulate_default)
return [accumulate_default_1]""",
    )


def backward() -> fx.GraphModule:
    b, up, down, x, middle = mlp()
    dy = b.input("dy", 3, 4)
    d_middle = b.mm(dy, down)
    turned = b.call(aten.permute.default, b.call(aten.mul.Tensor, d_middle, middle), [1, 0])
    of_up = b.reduce_grad(b.mm(turned, x), up)
    of_down = b.reduce_grad(b.mm(b.call(aten.permute.default, dy, [1, 0]), middle), down)
    of_x = b.mm(b.call(aten.permute.default, turned, [1, 0]), up)
    return b.output(of_up, of_down, of_x)


def test_the_backward_reduces_rows_and_columns_and_gathers_each_tile_once() -> None:
    gm = backward()
    p = in_a_loop(gm)
    assert tile_mlp(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
permute_default_2 = permute(dy, [1, 0])
unshard_default = unshard(up_shard, up)
permute_default_4 = permute(unshard_default, [1, 0])
unshard_default_1 = unshard(down_shard, down)
mm_default_5 = mm(dy, unshard_default_1)
mm_default_6 = mm(x, permute_default_4)
relu_default_1 = relu(mm_default_6)
mul_tensor_1 = mul(mm_default_5, relu_default_1)
permute_default_5 = permute(mul_tensor_1, [1, 0])
mm_default_7 = mm(permute_default_5, x)
reduce_grad_default_2 = reduce_grad(mm_default_7, up)
place_default = place([reduce_grad_default_2], None, [4, 4], 0, 0)
mm_default_8 = mm(permute_default_2, relu_default_1)
reduce_grad_default_3 = reduce_grad(mm_default_8, down)
view_default = view(reduce_grad_default_3, [2, 2, 2])
place_default_1 = place([view_default], None, [-1, 2, 4], 2, 0)
permute_default_6 = permute(permute_default_5, [1, 0])
accumulate_default = accumulate([permute_default_6, unshard_default], None)
unshard_default_2 = unshard(up_shard, up)
permute_default_7 = permute(unshard_default_2, [1, 0])
unshard_default_3 = unshard(down_shard, down)
mm_default_9 = mm(dy, unshard_default_3)
mm_default_10 = mm(x, permute_default_7)
relu_default_2 = relu(mm_default_10)
mul_tensor_2 = mul(mm_default_9, relu_default_2)
permute_default_8 = permute(mul_tensor_2, [1, 0])
mm_default_11 = mm(permute_default_8, x)
reduce_grad_default_4 = reduce_grad(mm_default_11, up)
place_default_2 = place([reduce_grad_default_4], place_default, [4, 4], 0, 2)
mm_default_12 = mm(permute_default_2, relu_default_2)
reduce_grad_default_5 = reduce_grad(mm_default_12, down)
view_default_1 = view(reduce_grad_default_5, [2, 2, 2])
place_default_3 = place([view_default_1], place_default_1, [-1, 2, 4], 2, 2)
permute_default_9 = permute(permute_default_8, [1, 0])
accumulate_default_1 = accumulate([permute_default_9, unshard_default_2], accumulate_default)
view_default_2 = view(place_default_3, [2, 8])
return [place_default_2, view_default_2, accumulate_default_1]""",
    )
    assert gather(gm, p) == 4
    assert reduce(gm, p) == 4
    verify(gm, p)


@pytest.mark.parametrize("added", [True, False])
def test_what_reads_a_sum_and_leads_to_the_middle_again_gets_a_loop_of_its_own(added: bool) -> None:
    b, up, down, x, middle = mlp()
    turned = b.call(aten.permute.default, up, [1, 0])
    y = b.mm(middle, b.call(aten.permute.default, down, [1, 0]))
    again = b.call(aten.relu.default, b.mm(b.call(aten.add.Tensor, x, y) if added else y, turned))
    gm = b.output(b.mm(again, b.call(aten.permute.default, down, [1, 0])))
    p = in_a_loop(gm)
    assert tile_mlp(gm, p) == 4
    assert gather(gm, p) == 8
    verify(gm, p)


def test_a_middle_that_is_mixed_leaves_each_weight_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    b, _, down, _, middle = mlp()
    mixed = b.call(aten._softmax.default, middle, 1, False)
    gm = b.output(b.mm(mixed, b.call(aten.permute.default, down, [1, 0])))
    p = in_a_loop(gm)
    assert tile_mlp(gm, p) == 0
    assert "mlp was planned in one loop of 2 tiles, and its weights are in tiles one by one" in caplog.text
    assert tile(gm, p) == 4
    assert gather(gm, p) == 4
    verify(gm, p)


def test_nothing_is_done_without_a_loop() -> None:
    gm = forward()
    before = show(gm)
    assert tile_mlp(gm, plan(gm, "up", "down")) == 0
    assert show(gm) == before
