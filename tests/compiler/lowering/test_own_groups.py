"""Collectives of graphs get the group that there is for theirs, by name."""

from __future__ import annotations

import torch
from torch import fx

from zerograph.compiler.lowering.own_groups import use_own_groups

functional = torch.ops._c10d_functional


def test_collectives_of_other_groups_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    summed = graph.call_function(functional.all_reduce.default, (x, "sum", "3"))
    waited = graph.call_function(functional.wait_tensor.default, (summed,))
    gathered = graph.call_function(functional.all_gather_into_tensor.default, (waited, 2, "4"))
    named = graph.call_function(torch.ops.aten.mul.Tensor, (gathered, 3))
    graph.output(named)
    assert use_own_groups(graph, {}) == 0 and summed.args == (x, "sum", "3")
    assert use_own_groups(graph, {"3": "ours"}) == 1
    assert (summed.args, gathered.args, waited.args) == ((x, "sum", "ours"), (waited, 2, "4"), (summed,))
    assert use_own_groups(graph, {"3": "ours"}) == 0
