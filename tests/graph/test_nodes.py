"""What passes read off nodes: markers, views, sizes, what is overwritten; and the error that shows a node's place."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch.fx.experimental.proxy_tensor import make_fx

from zerograph.graph import nodes
from zerograph.graph.nodes import SPEC_AT, BucketFact
from zerograph.graph.ops import REDUCE_GRAD, UNSHARD

aten = torch.ops.aten


def test_markers_are_read_in_order() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    w, v = b.params("w", "v", dtype=torch.bfloat16)
    product = b.mm(x, b.call(torch.ops.prims.convert_element_type.default, w, torch.bfloat16))
    b.reduce_grad(product, v)
    gm = b.output(product, v)
    found = nodes.markers(gm.graph, UNSHARD)
    assert [(m.name, m.group, m.dtype, m.reduce_dtype, m.sharded) for m in found] == [
        ("w", "0", torch.bfloat16, torch.float32, True),
        ("v", "0", torch.bfloat16, torch.float32, True),
    ]
    assert [m.source.name for m in found] == ["w_shard", "v_shard"]
    (reduced,) = nodes.markers(gm.graph, REDUCE_GRAD)
    assert (reduced.name, reduced.source) == ("v", product)


@pytest.mark.parametrize("op", [UNSHARD, REDUCE_GRAD], ids=str)
def test_a_spec_begins_with_the_name(op: torch._ops.OpOverload) -> None:
    arguments = [argument.name for argument in op._schema.arguments]
    assert arguments[SPEC_AT[op] :] == ["name", "group", "dtype", "reduce_dtype", "sharded", "device"]


def test_sizes_that_are_open_stay_open() -> None:
    """A comparison of two symbols would make torch assume that they differ."""
    gm = make_fx(lambda x, y: x.as_strided(y.shape, y.stride()), tracing_mode="symbolic")(torch.ones(6), torch.ones(5))
    assumed = len(gm.shape_env.guards)
    assert not any(map(nodes.is_identity_view, gm.graph.nodes))
    assert len(gm.shape_env.guards) == assumed


def test_views_and_those_that_change_nothing() -> None:
    b = Builder()
    x = b.input("x", 4, 6)
    same = b.call(aten.view.default, x, [4, 6])
    twice = b.call(aten.alias.default, same)
    flat = b.call(aten.view.default, twice, [24])
    turned = b.call(aten.t.default, x)
    parts = b.call(aten.split.Tensor, x, 2)
    part = b.call(operator.getitem, parts, 1)
    copy = b.call(aten.clone.default, x)
    both = b.call(aten.var_mean.correction, x)
    mean = b.call(operator.getitem, both, 1)
    assert all(map(nodes.is_view, (same, twice, flat, turned, parts, part)))
    assert not any(map(nodes.is_view, (x, copy, both, mean)))
    assert [n for n in b.graph.nodes if nodes.is_identity_view(n)] == [same, twice]
    assert nodes.behind_identity(twice) is x and nodes.behind_identity(flat) is flat


def test_what_the_backward_is() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    product = b.mm(x, w)
    gradient = b.input("gradient", 4, 4)
    other = b.mm(gradient, w)
    gradient.meta["partitioner_tag"] = "is_backward"
    after = b.mm(product, other)
    assert nodes.backward_nodes(b.graph) == {gradient, other, after}


def test_what_reads_an_input_before_or_after_it_is_overwritten() -> None:
    b = Builder()
    count, x = b.input("count", 4), b.input("x", 4)
    view = b.call(aten.view.default, count, [2, 2])
    double = b.call(aten.add.Tensor, view, view)
    far = b.call(aten.neg.default, double)
    other = b.call(aten.neg.default, x)
    written = b.call(aten.copy_.default, count, other)
    order = [view, double, far, other, written]
    assert nodes.readings_of_overwritten(order) == [view, double]
    assert nodes.readings_of_overwritten(order[:-1]) == []


def test_sizes_are_no_work_on_data() -> None:
    def halves(n: int, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(n // 2 + n) + x.sum()

    gm = make_fx(halves, tracing_mode="symbolic")(6, torch.ones(6, 5))
    open_size, *_ = gm.graph.find_nodes(op="placeholder")
    sizes = [n for n in gm.graph.nodes if nodes.is_size(n)]
    assert [n.target for n in sizes] == [open_size.target, operator.floordiv, operator.add]


def test_sizes_are_reported_at_any_depth() -> None:
    def doubled(n: int, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(n + n) + x.sum()

    gm = make_fx(doubled, tracing_mode="symbolic")(6, torch.ones(12))
    *_, last = (n for n in gm.graph.nodes if nodes.is_size(n))
    for _ in range(1000):
        with gm.graph.inserting_after(last):
            twice = gm.graph.call_function(operator.add, (last, last))
        twice.meta["val"], last = last.meta["val"], twice
    assert nodes.is_size(last)


def test_a_returned_parameter_and_a_view_of_one_are_copied() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    w, v = b.params("w", "v")
    view = b.call(aten.t.default, v, name="view")
    gm = b.output(b.mm(x, w), w, view, w)
    nodes.protect_outputs(gm.graph)
    gm.graph.lint()
    assert_expected_inline(
        show(gm),
        """\
w_full = unshard(w_shard, w)
v_full = unshard(v_shard, v)
view = t(v_full)
mm_default = mm(x, w_full)
clone_default = clone(w_full)
clone_default_1 = clone(view)
return [mm_default, clone_default, clone_default_1, clone_default]""",
    )
    before = show(gm)
    nodes.protect_outputs(gm.graph)
    assert show(gm) == before


def test_a_new_node_stands_for_the_one_it_is_like() -> None:
    b = Builder()
    b.module = "L['self'].up"
    x = b.input("x", 4, 4)
    old = b.mm(x, x)
    old.meta["recompute"] = "not to be taken over"
    new = nodes.call(b.graph, aten.neg.default, (old,), old.meta["val"], old)
    assert new.meta.keys() == {"val", "stack_trace", "nn_module_stack"}
    assert nodes.call(b.graph, aten.neg.default, (old,), None).meta == {"val": None}
    assert nodes.positions(b.graph)[new] == 2
    assert nodes.output_of(b.output(new).graph).op == "output"


def test_the_error_shows_parameters_neighbours_and_the_source_line() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    w, v = b.params("w", "v")
    product = b.mm(b.mm(x, w), v)
    gm = b.output(product)
    product.meta["zg"] = BucketFact(0, plan(gm, "w v").buckets[0].params)
    message = str(nodes.broken(product, "is read after its free"))
    assert message.startswith('mm_default_1: is read after its free (parameters: w, v; File "model.py", line 4)\n')
    lines = message.split("\n")
    assert [word in line for word, line in zip(("mm_default", "%mm_default_1", "output"), lines[1:4], strict=True)] == [
        True
    ] * 3
    assert "hint: this is a bug in ZeroGraph" in message
    x.meta.pop("stack_trace", None)
    assert "(parameters: -; unknown source line)" in str(nodes.broken(x, "is wrong"))
