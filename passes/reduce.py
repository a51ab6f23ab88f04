"""Replace ``reduce_grad`` markers by one reduction per bucket or tile, started as soon as its last gradient exists.

A reduction starts at the first cut after its bucket's last gradient (where the next bucket of the backward is waited
for, or a layer begins), so that it costs no cut of its own. It is waited for where the next reduction starts, or a
later one where the plan lets several be under way, so that it travels while the buckets in between compute. Safe
because nothing reads a reduced gradient but the graph's output.
"""

from __future__ import annotations

import operator
from bisect import bisect_right

from torch import fx

from zerograph.core.plan import Bucket, Plan
from zerograph.graph.layers import layer_starts
from zerograph.graph.nodes import (
    BucketFact,
    Marker,
    call,
    markers,
    move_users_after,
    output_of,
    part_of_plan,
    positions,
    transfer_of,
)
from zerograph.graph.ops import FREE, INSTRUCTIONS, REDUCE, REDUCE_GRAD, WAIT_REDUCE


def reduce(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite the backward graph ``gm`` in place; returns the number of reductions inserted."""
    groups = _groups(gm.graph, plan)
    if not groups:
        return 0
    places, bucket_of = _places(gm.graph, groups), plan.bucket_of()
    under_way: list[tuple[fx.Node, list[Marker], BucketFact]] = []
    for group, place in zip(groups, places, strict=True):
        with gm.graph.inserting_before(place):
            if len(under_way) == plan.reductions:
                _finish(gm.graph, *under_way.pop(0))
            under_way.append(_start(gm.graph, bucket_of[group[0].name], group))
    with gm.graph.inserting_before(output_of(gm.graph)):
        for pending in under_way:
            _finish(gm.graph, *pending)
    for group in groups:
        for marker in group:
            gm.graph.erase_node(marker.node)
    return len(groups)


def _groups(graph: fx.Graph, plan: Plan) -> list[list[Marker]]:
    """The markers of each bucket, or term of a tile, in the plan's order, in the order in which their last gradient
    exists."""
    order, bucket_of = positions(graph), plan.bucket_of()
    rank = {p.name: i for b in plan.buckets for i, p in enumerate(b.params)}
    groups: dict[tuple[int, ...], list[Marker]] = {}
    for marker in markers(graph, REDUCE_GRAD):
        term = marker.tile.term if marker.tile is not None else 0
        groups.setdefault((*part_of_plan(marker, bucket_of[marker.name]), term), []).append(marker)
    for group in groups.values():
        # Ranks send a bucket as one message, so that its layout must be the same on all.
        group.sort(key=lambda m: rank[m.name])
    return sorted(groups.values(), key=lambda group: max(order[m.source] for m in group))


def _places(graph: fx.Graph, groups: list[list[Marker]]) -> list[fx.Node]:
    """For each bucket, the node before which its reduction starts."""
    order = positions(graph)
    nodes = list(graph.nodes)
    first = order[max(graph.find_nodes(op="placeholder"), key=order.__getitem__, default=nodes[0])]
    # A gradient may be an input of the graph; nothing can start between inputs.
    ready = [max(first, *(order[m.source] for m in group)) for group in groups]
    layers = set(layer_starts(graph))
    cuts = [i for i, n in enumerate(nodes) if n in layers or (_is_instruction(n) and not _is_instruction(n.prev))]
    cuts = [next(k for k in range(i, len(nodes)) if nodes[k].target is not FREE) for i in cuts]  # free before sending
    end = order[output_of(graph)]
    places = []
    for i, at in enumerate(ready):
        # No later than the next bucket's last gradient: waiting for a cut behind that would hold two buckets' full
        # gradients.
        limit = ready[i + 1] if i + 1 < len(ready) else end
        behind = bisect_right(cuts, at)
        cut = cuts[behind] if behind < len(cuts) else end
        places.append(nodes[cut] if cut <= limit or cut == end == limit else nodes[at].next)
    return places


def _is_instruction(node: fx.Node) -> bool:
    return node.target in INSTRUCTIONS


def _start(graph: fx.Graph, bucket: Bucket, group: list[Marker]) -> tuple[fx.Node, list[Marker], BucketFact]:
    transfer = transfer_of(group, bucket)
    grads = [m.source for m in group]
    start = call(graph, REDUCE, (grads, *transfer.part), grads[0].meta["val"].new_empty(0), group[0].node)
    start.meta["zg"] = transfer
    return start, group, transfer


def _finish(graph: fx.Graph, start: fx.Node, group: list[Marker], transfer: BucketFact) -> None:
    vals = [m.node.meta["val"] for m in group]
    wait = call(graph, WAIT_REDUCE, (start, start.args[0], *transfer.part), vals, group[0].node)
    wait.meta["zg"] = transfer
    for k, marker in enumerate(group):
        result = call(graph, operator.getitem, (wait, k), vals[k], marker.node)
        for user in list(marker.node.users):
            user.replace_input_with(marker.node, result)
        move_users_after(result)
