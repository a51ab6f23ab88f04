"""Names of what the forward makes, which last while other passes change the graph."""

from __future__ import annotations

import operator

import torch
from graphs import Builder
from torch import fx

from zerograph.graph.nodes import Activation
from zerograph.passes import name_activations

aten = torch.ops.aten


def _names(gm: fx.GraphModule) -> dict[str, str]:
    return {n.name: n.meta["zg"].name for n in gm.graph.nodes if isinstance(n.meta.get("zg"), Activation)}


def test_operators_of_the_forward_are_named_by_module_and_number() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (u,) = b.params("u")
    b.module = "L['self'].h.0.mlp"
    first = b.mm(x, u)
    second = b.mm(first, first)
    b.module = None
    rest = b.call(aten.neg.default, second)
    b.module = "L['self'].shared"
    shared = b.call(aten.sin.default, rest)
    b.module = "L['self'].h.1"
    last = b.call(aten.cos.default, shared)
    backward = b.mm(last, last)
    backward.meta["partitioner_tag"] = "is_backward"
    gm = b.output(backward)
    assert name_activations(gm) == 5
    assert _names(gm) == {
        first.name: "h.0.mlp:mm",
        second.name: "h.0.mlp:mm#2",
        rest.name: "h.0:neg",
        shared.name: "h.0:sin",  # what all layers share takes place in each
        last.name: "h.1:cos",
    }


def test_parts_of_a_tuple_have_its_name() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    b.module = "L['self'].h.0"
    both = b.call(aten.var_mean.correction, x, [0])
    parts = [b.call(operator.getitem, both, k) for k in range(2)]
    gm = b.output(b.call(aten.mul.Tensor, *parts))
    name_activations(gm)
    names = _names(gm)
    assert {names[node.name] for node in (both, *parts)} == {"h.0:var_mean.correction"}
