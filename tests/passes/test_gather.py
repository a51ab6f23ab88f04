"""Gathers and frees of whole buckets."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, run, show

from zerograph.passes import gather, verify

aten = torch.ops.aten


def test_each_bucket_is_gathered_before_its_first_use_and_freed_where_the_next_begins() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    u, v, w = b.params("u", "v", "w")
    gm = b.output(b.mm(b.mm(b.mm(x, u), v), w))
    p = plan(gm, "u v", "w")
    assert gather(gm, p) == 2
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([u_shard, v_shard], 0)
wait_gather_default = wait_gather(gather_default, [u_shard, v_shard], 0)
getitem = getitem(wait_gather_default, 0)
getitem_1 = getitem(wait_gather_default, 1)
mm_default = mm(x, getitem)
mm_default_1 = mm(mm_default, getitem_1)
free_default = free([getitem, getitem_1], 0)
gather_default_1 = gather([w_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [w_shard], 1)
getitem_2 = getitem(wait_gather_default_1, 0)
mm_default_2 = mm(mm_default_1, getitem_2)
free_default_1 = free([getitem_2], 1)
return [mm_default_2]""",
    )


def test_a_parameter_used_at_both_ends_is_gathered_twice() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    e, u, v = b.params("e", "u", "v")
    gm = b.output(b.mm(b.mm(b.mm(b.mm(x, e), u), v), b.call(aten.t.default, e)))
    p = plan(gm, "e", "u", "v", prefetch=1)
    assert gather(gm, p) == 4
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([e_shard], 0)
wait_gather_default = wait_gather(gather_default, [e_shard], 0)
getitem = getitem(wait_gather_default, 0)
mm_default = mm(x, getitem)
free_default = free([getitem], 0)
gather_default_1 = gather([u_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [u_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_1 = mm(mm_default, getitem_1)
free_default_1 = free([getitem_1], 1)
gather_default_2 = gather([v_shard], 2)
wait_gather_default_2 = wait_gather(gather_default_2, [v_shard], 2)
getitem_2 = getitem(wait_gather_default_2, 0)
mm_default_2 = mm(mm_default_1, getitem_2)
free_default_2 = free([getitem_2], 2)
gather_default_3 = gather([e_shard], 0)
wait_gather_default_3 = wait_gather(gather_default_3, [e_shard], 0)
getitem_3 = getitem(wait_gather_default_3, 0)
t_default_1 = t(getitem_3)
mm_default_3 = mm(mm_default_2, t_default_1)
free_default_3 = free([getitem_3], 0)
return [mm_default_3]""",
    )


def test_a_near_second_use_keeps_the_bucket_resident() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    e, u = b.params("e", "u")
    gm = b.output(b.mm(b.mm(b.mm(x, e), u), e))
    p = plan(gm, "e", "u", prefetch=1)
    assert gather(gm, p) == 2
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([e_shard], 0)
wait_gather_default = wait_gather(gather_default, [e_shard], 0)
getitem = getitem(wait_gather_default, 0)
mm_default = mm(x, getitem)
gather_default_1 = gather([u_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [u_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_1 = mm(mm_default, getitem_1)
mm_default_2 = mm(mm_default_1, getitem)
free_default = free([getitem], 0)
free_default_1 = free([getitem_1], 1)
return [mm_default_2]""",
    )


def test_buckets_in_turn_fit_or_are_gathered_again() -> None:
    for prefetch, gathers in ((0, 4), (1, 2)):
        b = Builder()
        x = b.input("x", 4, 4)
        u, v = b.params("u", "v")
        gm = b.output(b.mm(b.mm(b.mm(b.mm(x, u), v), u), v))
        p = plan(gm, "u", "v", prefetch=prefetch)
        assert gather(gm, p) == gathers
        verify(gm, p)


def test_one_operator_that_reads_two_buckets_through_views() -> None:
    b = Builder()
    u, v = b.params("u", "v")
    ut, vt = b.call(aten.t.default, u), b.call(aten.t.default, v)
    gm = b.output(b.mm(ut, vt))
    p = plan(gm, "u", "v", prefetch=0)
    assert gather(gm, p) == 2
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([u_shard], 0)
wait_gather_default = wait_gather(gather_default, [u_shard], 0)
getitem = getitem(wait_gather_default, 0)
gather_default_1 = gather([v_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [v_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
t_default_2 = t(getitem)
t_default_3 = t(getitem_1)
mm_default = mm(t_default_2, t_default_3)
free_default = free([getitem], 0)
free_default_1 = free([getitem_1], 1)
return [mm_default]""",
    )


def test_views_move_to_their_users() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    w, u, v = b.params("w", "u", "v")
    t = b.call(aten.t.default, w)
    gm = b.output(b.mm(b.mm(b.mm(b.mm(x, t), u), v), t))
    p = plan(gm, "w", "u", "v")
    gather(gm, p)
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([w_shard], 0)
wait_gather_default = wait_gather(gather_default, [w_shard], 0)
getitem = getitem(wait_gather_default, 0)
t_default_1 = t(getitem)
mm_default = mm(x, t_default_1)
free_default = free([getitem], 0)
gather_default_1 = gather([u_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [u_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_1 = mm(mm_default, getitem_1)
free_default_1 = free([getitem_1], 1)
gather_default_2 = gather([v_shard], 2)
wait_gather_default_2 = wait_gather(gather_default_2, [v_shard], 2)
getitem_2 = getitem(wait_gather_default_2, 0)
mm_default_2 = mm(mm_default_1, getitem_2)
free_default_2 = free([getitem_2], 2)
gather_default_3 = gather([w_shard], 0)
wait_gather_default_3 = wait_gather(gather_default_3, [w_shard], 0)
getitem_3 = getitem(wait_gather_default_3, 0)
t_default_2 = t(getitem_3)
mm_default_3 = mm(mm_default_2, t_default_2)
free_default_3 = free([getitem_3], 0)
return [mm_default_3]""",
    )


def test_parts_of_a_split_parameter() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (qkv,) = b.params("qkv", shape=(4, 8))
    parts = b.call(aten.split.Tensor, qkv, 4, 1)
    q, k = (b.call(operator.getitem, parts, i) for i in range(2))
    gm = b.output(b.mm(b.mm(x, q), k))
    p = plan(gm, "qkv")
    assert gather(gm, p) == 1
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([qkv_shard], 0)
wait_gather_default = wait_gather(gather_default, [qkv_shard], 0)
getitem_4 = getitem(wait_gather_default, 0)
split_tensor_1 = split(getitem_4, 4, 1)
getitem_2 = getitem(split_tensor_1, 0)
mm_default = mm(x, getitem_2)
split_tensor_2 = split(getitem_4, 4, 1)
getitem_3 = getitem(split_tensor_2, 1)
mm_default_1 = mm(mm_default, getitem_3)
free_default = free([getitem_4], 0)
return [mm_default_1]""",
    )


@pytest.mark.parametrize("view", [aten.diagonal.default, aten.squeeze.default, aten.t.default])
def test_every_kind_of_view_stays_within_its_visit(view: object) -> None:
    b = Builder(world_size=1)
    x = b.input("x", 4, 4)
    w, u, v = b.params("w", "u", "v")
    look = b.call(view, w)
    h = b.mm(b.mm(x, u), v)
    gm = b.output(b.call(aten.add.Tensor, h, look))
    before, _ = run(gm)
    p = plan(gm, "w", "u", "v", prefetch=0)
    gather(gm, p)
    verify(gm, p)
    after, peak = run(gm)
    assert torch.equal(before[0], after[0]) and peak == 1


def test_an_unused_marker_costs_nothing() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    gm = b.output(b.mm(x, x))
    assert gather(gm, plan(gm, "w")) == 0
    assert w not in gm.graph.nodes


def test_without_markers_nothing_happens() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    gm = b.output(b.mm(x, x))
    before = show(gm)
    assert gather(gm, plan(gm)) == 0
    assert show(gm) == before
