"""Where repeated layers begin in a graph: the places at which it is cut for free.

A cut where a layer begins costs no fusion worth having, as little more than the residual stream crosses it, and it
makes the segments of a layer the same in every layer, so that a deep model compiles in the time of one.
"""

from __future__ import annotations

import operator

import torch
import torch._inductor.inductor_prims  # registers the operators for seeds
from torch import fx

from zerograph import ir
from zerograph.ops import INSTRUCTIONS, REDUCE_GRAD, UNSHARD

_LEAST = 16
"""Operations between two cuts, at least: what a compiler has to fuse in less is worth more than a cut."""

_MODEL = "L['self']"
"""What Dynamo calls the module that was compiled; modules reached in other ways keep their whole path."""


def module_of(node: fx.Node) -> str | None:
    """The module that ``node`` computes, or whose gradient (``blocks.3.mlp``); None when tracing left no word of it.

    An empty string for the model itself.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path, _ = list(stack.values())[-1]
    return path.removeprefix(_MODEL).removeprefix(".")  # type: ignore[no-any-return]


def layer_of(node: fx.Node) -> str | None:
    """The repeated layer that ``node`` computes, or whose gradient (``blocks.3``).

    An empty string outside of repeated layers; None when tracing left no word of the module.
    """
    module = module_of(node)
    return None if module is None else ir.layer_of(module)


def layer_starts(graph: fx.Graph) -> list[fx.Node]:
    """The computing nodes at which a repeated layer begins, and what follows the last one; empty without layers.

    Several layers that are short begin where the first of them does.
    """
    nodes = [n for n in graph.nodes if _computes(n)]
    layers = [layer_of(n) for n in nodes]
    last = max((i for i, layer in enumerate(layers) if layer), default=len(layers))
    begun: set[str] = set()
    starts: list[fx.Node] = []
    length = 0  # of the layer so far
    for i, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
        if layer is not None and layer not in begun and (layer or i > last):
            begun.add(layer)
            if length >= _LEAST or not starts:
                starts.append(node)
                length = 0
        length += 1
    return starts


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in _NO_PLACE


# What moves to where its argument is, whichever layer it belongs to.
_NO_PLACE = INSTRUCTIONS | {
    UNSHARD,
    REDUCE_GRAD,
    operator.getitem,
    torch.ops.prims.inductor_seeds.default,
    torch.ops.prims.inductor_lookup_seed.default,
}
