"""Make the gradients of a loss in tiles in the forward, so that the backward need not compute logits again.

The backward's part of the region (:mod:`zerograph.tiling.loss_gradients`) is copied into the forward with 1 in place of
the loss's gradient, and what it makes is saved. The backward multiplies that by the gradient, once it is given one:
large sums in place (:data:`~zerograph.graph.ops.SCALE`), all else in its first segment.

Safe because the gradients are linear in the one number. Where that is 1, the usual case, they are the same to the bit.
"""

from __future__ import annotations

import logging

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.core.plan import Plan
from zerograph.graph.nodes import aten, call, computed
from zerograph.graph.ops import SCALE
from zerograph.tiling.cuts import Mixes
from zerograph.tiling.loss_gradients import LossGradients, loss_gradients
from zerograph.tiling.token_region import head_of, region_of

log = logging.getLogger(__name__)


def differentiate_loss(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite the joint graph ``gm`` in place; returns how many gradients the forward makes."""
    head = head_of(gm.graph.nodes, plan) if plan.loss_tiles > 1 else None
    if head is None:
        return 0
    try:
        region = region_of(head)
    except Mixes as error:
        # `recompute` warns where the forward's part is not by token either.
        log.debug("gradients of the loss are made in the backward: %s", error)
        return 0
    found = loss_gradients(gm.graph, region)
    if found is None:
        return 0
    made = _forward_of(gm.graph, found)
    for node in found.exits:
        made[node].meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # A weight's gradient is scaled in place: a second one would be the peak of many steps.
        in_place = region.cuts[node] is None and node.target is aten.mm.default
        with gm.graph.inserting_after(node):
            node.replace_all_uses_with(_scaled(gm.graph, made[node], found.tangent, node, in_place=in_place))
    gm.graph.eliminate_dead_code()  # what they were made with in the backward
    return len(found.exits)


def _forward_of(graph: fx.Graph, found: LossGradients) -> dict[fx.Node, fx.Node]:
    """Copy what computes the gradients, with 1 for the number that scales them; returns the copies."""
    number, first = found.tangent.meta["val"], found.nodes[0]
    with graph.inserting_before(first):
        like = {"dtype": number.dtype, "device": number.device}
        one = computed(graph, aten.full.default, ([], 1), first, like)
    copies = {found.tangent: one}
    for node in found.nodes:
        with graph.inserting_before(node):
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    for copy in copies.values():
        copy.meta = {key: value for key, value in copy.meta.items() if key not in ("recompute", "ac_graph_id")}
        copy.meta["partitioner_tag"] = "must_be_in_forward"
    return copies


def _scaled(graph: fx.Graph, made: fx.Node, by: fx.Node, like: fx.Node, *, in_place: bool) -> fx.Node:
    if in_place:
        val = made.meta["val"]
        return call(graph, SCALE, (made, by), val.new_empty(val.shape), like)
    return computed(graph, aten.mul.Tensor, (made, by), like)
