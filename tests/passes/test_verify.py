"""Each broken invariant is found, and the message says which node, which parameter and which line of the model."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.core.errors import InvariantError
from zerograph.core.plan import Plan
from zerograph.graph.ops import FREE, GATHER, REDUCE, WAIT_GATHER, WAIT_REDUCE
from zerograph.passes import gather, prefetch, reduce, verify

aten = torch.ops.aten


def _valid() -> tuple[fx.GraphModule, Plan]:
    """A rewritten graph with three buckets and the gradient of one of them."""
    b = Builder()
    x = b.input("x", 4, 4)
    u, v, w = b.params("u", "v", "w")
    h = b.mm(b.mm(b.mm(x, u), b.call(aten.t.default, v)), w)
    gm = b.output(h, b.reduce_grad(b.mm(h, h), u))
    p = plan(gm, "u", "v", "w", prefetch=1)
    for rewrite in (gather, prefetch, reduce):
        rewrite(gm, p)
    return gm, p


def _find(gm: fx.GraphModule, target: Any, index: int = 0) -> fx.Node:
    return list(gm.graph.find_nodes(op="call_function", target=target, sort=True))[index]


def _fails(gm: fx.GraphModule, p: Plan, message: str) -> str:
    with pytest.raises(InvariantError, match=message) as caught:
        verify(gm, p)
    return str(caught.value)


def test_a_valid_graph_passes_and_every_instruction_was_looked_at() -> None:
    gm, p = _valid()
    assert verify(gm, p) == 3 * 3 + 2


def test_golden_graph_and_message() -> None:
    gm, p = _valid()
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([u_shard], 0)
gather_default_1 = gather([v_shard], 1)
wait_gather_default = wait_gather(gather_default, [u_shard], 0)
getitem = getitem(wait_gather_default, 0)
mm_default = mm(x, getitem)
free_default = free([getitem], 0)
gather_default_2 = gather([w_shard], 2)
wait_gather_default_1 = wait_gather(gather_default_1, [v_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
t_default_1 = t(getitem_1)
mm_default_1 = mm(mm_default, t_default_1)
free_default_1 = free([getitem_1], 1)
wait_gather_default_2 = wait_gather(gather_default_2, [w_shard], 2)
getitem_2 = getitem(wait_gather_default_2, 0)
mm_default_2 = mm(mm_default_1, getitem_2)
mm_default_3 = mm(mm_default_2, mm_default_2)
free_default_2 = free([getitem_2], 2)
reduce_default = reduce([mm_default_3], 0)
wait_reduce_default = wait_reduce(reduce_default, [mm_default_3], 0)
getitem_3 = getitem(wait_reduce_default, 0)
return [mm_default_2, getitem_3]""",
    )
    _find(gm, GATHER).append(_find(gm, GATHER, 2))
    assert_expected_inline(
        _fails(gm, p, "3 buckets would be whole").replace(", kwargs = {}", ""),
        """\
gather_default_1: 3 buckets would be whole, at most 2 may (parameters: v; File "model.py", line 5)
  gather_default_2
  %gather_default_1 : [num_users=1] = call_function[target=torch.ops.zg.gather.default](args = ([%v_shard], 1))
  wait_gather_default

hint: this is a bug in ZeroGraph; please report it with this message""",
    )


def test_the_message_names_node_parameter_and_source_line() -> None:
    gm, p = _valid()
    gm.graph.erase_node(_find(gm, FREE, 2))
    text = _fails(gm, p, "bucket 2 is never freed")
    assert text.startswith("gather_default_2: ")
    assert "parameters: w;" in text
    assert 'File "model.py", line 7' in text
    assert "hint: this is a bug in ZeroGraph" in text


def test_a_marker_is_left() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    gm = b.output(b.mm(x, w))
    assert "line 1" in _fails(gm, plan(gm, "w"), "the marker of w was not rewritten")


def test_a_reduction_marker_is_left() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    gm = b.output(b.reduce_grad(b.mm(x, w), w))
    p = plan(gm, "w")
    gather(gm, p)
    _fails(gm, p, "the marker of w was not rewritten")


def test_a_read_after_free() -> None:
    gm, p = _valid()
    free = _find(gm, FREE)
    _find(gm, aten.mm.default).prepend(free)
    assert "mm" in _fails(gm, p, "reads getitem.* after it was freed")


def test_a_read_after_free_through_a_view() -> None:
    gm, p = _valid()
    _find(gm, aten.t.default).append(_find(gm, FREE, 1))
    _fails(gm, p, "reads t_default.* after it was freed")


def test_a_freed_parameter_is_returned() -> None:
    gm, p = _valid()
    output = next(iter(gm.graph.find_nodes(op="output")))
    output.update_arg(0, (*output.args[0], _find(gm, operator.getitem)))
    assert _fails(gm, p, "reads getitem.* after it was freed").startswith("output")


def test_a_bucket_is_gathered_twice_at_a_time() -> None:
    gm, p = _valid()
    first = _find(gm, GATHER)
    first.append(gm.graph.node_copy(first))
    _fails(gm, p, "bucket 0 is gathered twice at a time")


def test_too_many_buckets_are_unsharded() -> None:
    gm, p = _valid()
    _find(gm, GATHER).append(_find(gm, GATHER, 2))
    _fails(gm, p, "3 buckets would be whole, at most 2 may")


def test_a_bucket_is_freed_twice() -> None:
    gm, p = _valid()
    free = _find(gm, FREE, 2)
    copy = gm.graph.node_copy(free)
    copy.args = ([], 2)
    free.append(copy)
    _fails(gm, p, "bucket 2 is freed and was not gathered")


def test_a_bucket_is_freed_in_part() -> None:
    gm, p = _valid()
    _find(gm, FREE).update_arg(0, [])
    _fails(gm, p, "bucket 0 is freed in part: 0 of 1")


def test_a_bucket_is_waited_for_twice() -> None:
    gm, p = _valid()
    wait = _find(gm, WAIT_GATHER)
    wait.append(gm.graph.node_copy(wait))
    _fails(gm, p, "bucket 0 is waited for twice")


def test_a_bucket_is_freed_while_it_travels() -> None:
    gm, p = _valid()
    free = _find(gm, FREE, 2)
    free.update_arg(0, [])
    _find(gm, WAIT_GATHER, 2).prepend(free)
    _fails(gm, p, "bucket 2 is freed and was not waited for")


def test_a_reduction_is_never_waited_for() -> None:
    gm, p = _valid()
    output = next(iter(gm.graph.find_nodes(op="output")))
    output.update_arg(0, output.args[0][:1])
    wait = _find(gm, WAIT_REDUCE)
    for user in list(wait.users):
        gm.graph.erase_node(user)
    gm.graph.erase_node(wait)
    assert "parameters: u" in _fails(gm, p, "must be waited for exactly once")


def test_a_gradient_is_reduced_twice() -> None:
    gm, p = _valid()
    start, wait = _find(gm, REDUCE), _find(gm, WAIT_REDUCE)
    with gm.graph.inserting_after(wait):
        again = gm.graph.node_copy(start)
        again.append(second := gm.graph.node_copy(wait))
        second.update_arg(0, again)
    _fails(gm, p, "the gradient of u is reduced 2 times")
