"""The part of the backward that a loss in tiles can compute in the forward, while each tile's logits are there.

Where gradients of head and hidden states depend on one number from outside, the gradient of the loss, they are linear
in it: they are computed for 1, and multiplied by it once it is known. (Liger's kernels do the same.) So the backward
need not compute logits again. Not in float16, whose small gradients only a scaled loss keeps from becoming zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.graph.descent import reached
from zerograph.graph.nodes import aten, backward_nodes, is_view
from zerograph.tiling.cuts import Linear, is_zeros, linear_in
from zerograph.tiling.region import Region


@dataclass(frozen=True, slots=True)
class LossGradients:
    """Gradients that one number scales.

    Attributes:
        tangent: the number: the gradient of the loss, of shape [].
        nodes: what of the backward computes them, in order; some of it may compute other things too.
        exits: those of ``nodes`` that are the gradients: of hidden states, head and bias.
    """

    tangent: fx.Node
    nodes: list[fx.Node]
    exits: list[fx.Node]


def loss_gradients(graph: fx.Graph, region: Region) -> LossGradients | None:
    """The gradients that head and loss, ``region`` of the joint ``graph``, make; None where they depend on more than
    one number, or in another way than linearly."""
    scaled = _behind_tangents(graph)
    exits = [node for node in region.exits() if node in scaled]
    within = backward_nodes(graph) | scaled
    nodes = sorted(reached(exits, lambda node: filter(within.__contains__, node.all_input_nodes)))
    tangents = [node for node in nodes if node.op == "placeholder"]
    if len(tangents) != 1 or tangents[0].meta["val"].dim() or any(map(is_view, exits)):
        return None
    computing = [node for node in nodes if node is not tangents[0]]
    if not all(_is_linear(node, scaled) for node in computing if node in scaled):
        return None
    return LossGradients(tangents[0], computing, exits)


def _behind_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The gradients that the backward is given, and the nodes that depend on them."""
    given = (node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents"))
    return set(reached(given, lambda node: node.users))


def _is_linear(node: fx.Node, scaled: set[fx.Node]) -> bool:
    """Whether the result of ``node`` is linear in its arguments that are ``scaled``, with no term of others."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype == torch.float16:
        return False
    target: Any = node.target
    places = [place for place, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg in scaled]
    if len(places) < sum(source in scaled for source in node.all_input_nodes):
        return False
    if (linear := linear_in(node)) is not None:
        return places in _PLACES[linear]
    if target in (aten.scatter_add.default, aten.scatter.src):
        return places == [3] and is_zeros(node.args[0])
    if target is aten.slice_scatter.default:
        return places == [1] and is_zeros(node.args[0])
    if target is aten.where.self:
        return all(place in places or is_zeros(node.args[place]) for place in (1, 2)) and 0 not in places
    return False


_PLACES: Mapping[Linear, list[list[int]]] = {
    "each": [[0], [1]], "both": [[0, 1]], "first": [[0]], "factor and term": [[0, 2], [1, 2]],
}  # fmt: skip
"""Which arguments may be scaled where a result is linear in them."""
