"""Reduced gradients that are offloaded leave as soon as they are there."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show

from zerograph.core.plan import Placement, Plan
from zerograph.passes import gather, reduce, spill, tile, verify

aten = torch.ops.aten


def offloaded(found: Plan, bucket: int) -> Plan:
    placement = Placement(gradients="nvme", optimizer="nvme")
    return replace(
        found, buckets=tuple(replace(b, placement=placement) if b.index == bucket else b for b in found.buckets)
    )


def test_gradients_leave_behind_the_wait_for_their_reduction() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    u, v = b.params("u", "v")
    dv = b.reduce_grad(b.mm(g, g), v)
    h = b.mm(g, v)
    du = b.reduce_grad(b.mm(h, h), u)
    gm = b.output(du, dv, b.mm(h, u))
    p = offloaded(plan(gm, "u", "v"), 1)
    gather(gm, p)
    reduce(gm, p)
    assert spill(gm, p) == 1
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
mm_default = mm(g, g)
reduce_default = reduce([mm_default], 1)
gather_default = gather([v_shard], 1)
wait_gather_default = wait_gather(gather_default, [v_shard], 1)
getitem = getitem(wait_gather_default, 0)
mm_default_1 = mm(g, getitem)
mm_default_2 = mm(mm_default_1, mm_default_1)
free_default = free([getitem], 1)
wait_reduce_default = wait_reduce(reduce_default, [mm_default], 1)
getitem_2 = getitem(wait_reduce_default, 0)
spill_default = spill([getitem_2], 1)
getitem_4 = getitem(spill_default, 0)
reduce_default_1 = reduce([mm_default_2], 0)
gather_default_1 = gather([u_shard], 0)
wait_gather_default_1 = wait_gather(gather_default_1, [u_shard], 0)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_3 = mm(mm_default_1, getitem_1)
free_default_1 = free([getitem_1], 0)
wait_reduce_default_1 = wait_reduce(reduce_default_1, [mm_default_2], 0)
getitem_3 = getitem(wait_reduce_default_1, 0)
return [getitem_3, getitem_4, mm_default_3]""",
    )


def test_what_stays_on_the_device_is_not_spilled() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    (u,) = b.params("u")
    gm = b.output(b.reduce_grad(b.mm(g, u), u))
    p = plan(gm, "u")
    gather(gm, p)
    reduce(gm, p)
    assert spill(gm, p) == 0


def test_tiles_of_a_gradient_leave_one_by_one() -> None:
    b = Builder(world_size=1)
    g, x = b.input("g", 3, 8), b.input("x", 3, 4)
    (w,) = b.params("w", shape=(8, 4))
    gm = b.output(b.reduce_grad(b.mm(b.call(aten.permute.default, g, [1, 0]), x), w))
    p = offloaded(plan(gm, "w", world_size=1), 0)
    p = replace(p, buckets=(replace(p.buckets[0], tiles=2),))
    tile(gm, p)
    gather(gm, p)
    reduce(gm, p)
    assert spill(gm, p) == 2
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
view_default = view(g, 1, 0, 4)
permute_default_1 = permute(view_default, [1, 0])
mm_default_1 = mm(permute_default_1, x)
reduce_default = reduce([mm_default_1], 0, 0)
view_default_1 = view(g, 1, 4, 8)
permute_default_2 = permute(view_default_1, [1, 0])
mm_default_2 = mm(permute_default_2, x)
wait_reduce_default = wait_reduce(reduce_default, [mm_default_1], 0, 0)
getitem = getitem(wait_reduce_default, 0)
spill_default = spill([getitem], 0, None)
getitem_2 = getitem(spill_default, 0)
reduce_default_1 = reduce([mm_default_2], 0, 1)
wait_reduce_default_1 = wait_reduce(reduce_default_1, [mm_default_2], 0, 1)
getitem_1 = getitem(wait_reduce_default_1, 0)
spill_default_1 = spill([getitem_1], 0, getitem_2)
getitem_3 = getitem(spill_default_1, 0)
return [getitem_3]""",
    )
