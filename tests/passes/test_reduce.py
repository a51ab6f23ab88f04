"""One reduction per bucket, started at a cut that is there anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, run, show
from torch import fx

from zerograph.core.errors import InvariantError
from zerograph.graph.ops import INSTRUCTIONS, REDUCE, WAIT_REDUCE
from zerograph.passes import gather, reduce, verify

aten = torch.ops.aten


def test_each_bucket_is_reduced_at_the_next_cut_and_waited_for_at_the_one_after() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    u, v, w = b.params("u", "v", "w")
    dw = b.reduce_grad(b.mm(g, g), w)
    h = b.mm(g, w)
    dv = b.reduce_grad(b.mm(h, h), v)
    i = b.mm(h, v)
    du = b.reduce_grad(b.mm(i, i), u)
    gm = b.output(du, dv, dw, b.mm(i, u))
    p = plan(gm, "u", "v", "w")
    gather(gm, p)
    assert reduce(gm, p) == 3
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
mm_default = mm(g, g)
reduce_default = reduce([mm_default], 2)
gather_default = gather([w_shard], 2)
wait_gather_default = wait_gather(gather_default, [w_shard], 2)
getitem = getitem(wait_gather_default, 0)
mm_default_1 = mm(g, getitem)
mm_default_2 = mm(mm_default_1, mm_default_1)
free_default = free([getitem], 2)
wait_reduce_default = wait_reduce(reduce_default, [mm_default], 2)
getitem_3 = getitem(wait_reduce_default, 0)
reduce_default_1 = reduce([mm_default_2], 1)
gather_default_1 = gather([v_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [v_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_3 = mm(mm_default_1, getitem_1)
mm_default_4 = mm(mm_default_3, mm_default_3)
free_default_1 = free([getitem_1], 1)
wait_reduce_default_1 = wait_reduce(reduce_default_1, [mm_default_2], 1)
getitem_4 = getitem(wait_reduce_default_1, 0)
reduce_default_2 = reduce([mm_default_4], 0)
gather_default_2 = gather([u_shard], 0)
wait_gather_default_2 = wait_gather(gather_default_2, [u_shard], 0)
getitem_2 = getitem(wait_gather_default_2, 0)
mm_default_5 = mm(mm_default_3, getitem_2)
free_default_2 = free([getitem_2], 0)
wait_reduce_default_2 = wait_reduce(reduce_default_2, [mm_default_4], 0)
getitem_5 = getitem(wait_reduce_default_2, 0)
return [getitem_5, getitem_4, getitem_3, mm_default_5]""",
    )


def test_as_many_reductions_are_under_way_as_the_plan_lets_be() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    names = ("u", "v", "w")
    h, gradients = g, []
    for param in b.params(*names):
        gradients.append(b.reduce_grad(b.mm(h, h), param))
        h = b.mm(h, param)
    gm = b.output(*gradients, h)
    two = replace(plan(gm, *names), reductions=2)
    gather(gm, two)
    assert reduce(gm, two) == 3
    verify(gm, two)
    order = [n.target for n in gm.graph.nodes if n.target in (REDUCE, WAIT_REDUCE)]
    assert order == [REDUCE, REDUCE, WAIT_REDUCE, REDUCE, WAIT_REDUCE, WAIT_REDUCE]
    with pytest.raises(InvariantError, match="2 reductions are under way, at most 1 may be"):
        verify(gm, replace(two, reductions=1))


def test_gradients_travel_in_the_order_of_the_plan() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    u, v = b.params("u", "v")
    dv = b.reduce_grad(b.mm(g, g), v)
    du = b.reduce_grad(b.mm(dv.args[0], g), u)
    gm = b.output(du, dv)
    assert reduce(gm, plan(gm, "u v")) == 1
    assert_expected_inline(
        show(gm),
        """\
u_full = unshard(u_shard, u)
v_full = unshard(v_shard, v)
mm_default = mm(g, g)
mm_default_1 = mm(mm_default, g)
reduce_default = reduce([mm_default_1, mm_default], 0)
wait_reduce_default = wait_reduce(reduce_default, [mm_default_1, mm_default], 0)
getitem = getitem(wait_reduce_default, 0)
getitem_1 = getitem(wait_reduce_default, 1)
return [getitem, getitem_1]""",
    )


def test_two_buckets_ready_between_the_same_cuts_make_a_cut_of_their_own() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    u, v = b.params("u", "v")
    dv = b.reduce_grad(b.mm(g, g), v)
    du = b.reduce_grad(b.mm(dv.args[0], g), u)
    gm = b.output(du, dv)
    assert reduce(gm, plan(gm, "u", "v")) == 2
    assert_expected_inline(
        show(gm),
        """\
u_full = unshard(u_shard, u)
v_full = unshard(v_shard, v)
mm_default = mm(g, g)
reduce_default = reduce([mm_default], 1)
mm_default_1 = mm(mm_default, g)
wait_reduce_default = wait_reduce(reduce_default, [mm_default], 1)
getitem = getitem(wait_reduce_default, 0)
reduce_default_1 = reduce([mm_default_1], 0)
wait_reduce_default_1 = wait_reduce(reduce_default_1, [mm_default_1], 0)
getitem_1 = getitem(wait_reduce_default_1, 0)
return [getitem_1, getitem]""",
    )


def test_what_reads_a_reduced_gradient_moves_behind_the_wait() -> None:
    b = Builder(world_size=1)
    g = b.input("g", 4, 4)
    u, v = b.params("u", "v")
    dv = b.call(aten.neg.default, b.call(aten.t.default, b.reduce_grad(b.mm(g, g), v)))
    du = b.reduce_grad(b.mm(b.mm(g, v), g), u)
    gm = b.output(du, dv)
    before, _ = run(gm)
    p = plan(gm, "u", "v", world_size=1)
    gather(gm, p)
    reduce(gm, p)
    verify(gm, p)
    after, _ = run(gm)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_gradient_that_is_an_input_is_reduced_after_all_inputs() -> None:
    b = Builder()
    g, x = b.input("g", 4, 4), b.input("x", 4, 4)
    u, v = b.params("u", "v")
    du = b.reduce_grad(g, u)
    gm = b.output(du, b.reduce_grad(b.mm(g, x), v))
    reduce(gm, plan(gm, "u", "v"))
    kinds = [n.op for n in gm.graph.nodes if n.op == "placeholder" or n.target in INSTRUCTIONS]
    assert kinds == sorted(kinds, reverse=True)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    frozen, w = b.params("frozen", "w")
    h = b.mm(g, frozen)
    gm = b.output(b.reduce_grad(b.mm(h, w), w))
    p = plan(gm, "frozen w")
    gather(gm, p)
    reduce(gm, p)
    verify(gm, p)
    assert [p.name for n in _reductions(gm) for p in n.meta["zg"].params] == ["w"]


def test_one_gradient_of_two_parameters() -> None:
    """Two biases that are added at one place share their gradient."""
    b = Builder()
    g = b.input("g", 4, 4)
    u, v = b.params("u", "v")
    shared = b.call(aten.neg.default, g)
    gm = b.output(b.reduce_grad(shared, u), b.reduce_grad(shared, v))
    p = plan(gm, "u v")
    assert reduce(gm, p) == 1
    assert _reductions(gm)[0].args[0] == [shared, shared]


def test_without_markers_nothing_happens() -> None:
    b = Builder()
    g = b.input("g", 4, 4)
    gm = b.output(b.mm(g, g))
    before = show(gm)
    assert reduce(gm, plan(gm)) == 0
    assert show(gm) == before


def _reductions(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=REDUCE))
