"""Where parts of a saved layer begin in its backward, and what is made again because it cannot be put together."""

from __future__ import annotations

from dataclasses import replace

import torch
from graphs import Builder, plan
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Activation, LayerGradient
from zerograph.passes import prepare_parts

aten = torch.ops.aten
NAME = "blocks.0.up:mm"
SAMPLES, TOKENS, WIDTH = 4, 3, 2


def joint() -> tuple[fx.GraphModule, Plan, dict[str, fx.Node]]:
    """A product whose result is cut in two, and the gradients of its factors."""
    b = Builder()
    b.module = "L['self'].blocks.0"
    x, dy = b.input("x", SAMPLES, TOKENS, WIDTH), b.input("dy", SAMPLES, TOKENS, WIDTH)
    up = b.params("up", shape=(2 * WIDTH, WIDTH))[0]
    rows = b.call(aten.view.default, x, [SAMPLES * TOKENS, WIDTH])
    product = b.mm(rows, b.call(aten.permute.default, up, [1, 0]))
    product.meta["zg"] = Activation(NAME)
    both = b.call(aten.view.default, product, [SAMPLES, TOKENS, 2 * WIDTH])
    gate = b.call(aten.slice.Tensor, both, 2, 0, WIDTH)
    value = b.call(aten.slice.Tensor, both, 2, WIDTH, 2 * WIDTH)
    made = b.call(aten.mul.Tensor, gate, value)
    first = len(b.graph.nodes)
    d_gate, d_value = b.call(aten.mul.Tensor, dy, value), b.call(aten.mul.Tensor, dy, gate)
    grad = b.call(aten.view.default, b.call(aten.cat.default, [d_gate, d_value], 2), [SAMPLES * TOKENS, 2 * WIDTH])
    of_up = b.mm(b.call(aten.permute.default, grad, [1, 0]), rows)
    of_x = b.call(aten.view.default, b.mm(grad, up), [SAMPLES, TOKENS, WIDTH])
    gm = b.output(made, of_x, b.reduce_grad(of_up, up))
    for node in list(gm.graph.nodes)[first:]:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward"
    parts = {"token_tiles": 2, "token_regions": (NAME,), "by_sample": True}
    return gm, replace(plan(gm, "up"), **parts), {"gate": gate, "both": both, "product": product, "of_x": of_x}


def test_the_gradient_of_what_a_layer_reads_bears_its_name_and_the_number_of_samples() -> None:
    gm, p, nodes = joint()
    assert prepare_parts(gm, p) == 1
    named = [node for node in gm.graph.nodes if isinstance(node.meta.get("zg"), LayerGradient)]
    assert named == [nodes["of_x"].args[0]]
    assert named[0].meta["zg"] == LayerGradient(NAME, SAMPLES)
    assert nodes["product"].meta["zg"] == Activation(NAME)


def test_pieces_of_a_tensor_are_made_again_of_what_is_saved() -> None:
    gm, p, nodes = joint()
    prepare_parts(gm, p)
    tagged = {name for name, node in nodes.items() if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE}
    assert tagged == {"gate", "both"}  # views, up to the product


def test_other_plans_leave_the_graph_as_it_is() -> None:
    gm, p, nodes = joint()
    assert prepare_parts(gm, replace(p, by_sample=False)) == 0
    assert prepare_parts(gm, replace(p, token_tiles=1, token_regions=(), by_sample=False)) == 0
    assert (
        prepare_parts(gm, replace(p, recompute=("blocks.0",))) == 0
    )  # its product is made again, and begins the parts
    assert not any("recompute" in node.meta for node in nodes.values())


def test_a_recomputed_layer_that_saves_some_is_made_ready() -> None:
    gm, p, _ = joint()
    assert prepare_parts(gm, replace(p, recompute=("blocks.0",), save=("blocks.0:mul.Tensor",))) == 1
