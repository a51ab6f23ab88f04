"""What a graph tells the planner."""

from __future__ import annotations

import operator

import torch
from graphs import Builder
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.compiler.capture import capture

aten = torch.ops.aten


def test_costs_aliases_and_parameters_of_operations() -> None:
    graph = Builder()
    x = graph.input("x", 8, 4)
    (weight,) = graph.params("w")
    product = graph.mm(x, weight)
    view = graph.call(aten.view.default, product, [32])
    mean = graph.call(aten.mean.default, graph.call(aten.tanh.default, view))
    gradient = graph.reduce_grad(weight, weight)
    graph.output(mean, gradient)
    mean.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    step = capture(graph.graph, training=True, world_size=2, tied={"w": ("head.w",)})
    ops, values = {op.name: op for op in step.ops}, {v.name: v for v in step.values}
    assert (ops[product.name].flops, ops[product.name].moved) == (2 * 8 * 4 * 4, (8 * 4 + 4 * 4 + 8 * 4) * 4)
    assert (ops[view.name].flops, ops[view.name].moved) == (0, 0)
    assert values[view.name].alias_of == product.name
    assert values[product.name].alias_of == ""
    assert [op.name for op in step.ops if op.cheap] == [view.name, "tanh_default"]
    assert [op.name for op in step.ops if op.again] == [mean.name]
    assert ops[product.name].params == ops[weight.name].params == ops[gradient.name].params == ("w",)
    assert step.outputs == (mean.name,)
    assert [op.name for op in step.ops if op.phase == "backward"] == [gradient.name]
    assert [(p.name, p.tied_to) for p in step.params] == [("w", ("head.w",))]


def test_a_tuple_has_no_memory_of_its_own() -> None:
    graph = Builder()
    both = graph.call(aten.var_mean.correction, graph.input("x", 8, 4))
    part = graph.call(operator.getitem, both, 0)
    graph.output(part)
    values = {v.name: v for v in capture(graph.graph, training=False).values}
    assert (values[both.name].bytes, values[part.name].bytes, values[part.name].alias_of) == (0, 4, "")
