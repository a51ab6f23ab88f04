"""Move reduced gradients off the device as soon as they are there, while the backward goes on.

    here = zg.wait_reduce(...); there = zg.spill(here, bucket)

A gradient that is reduced in tiles moves tile by tile, each with what stands for the whole so far:

    there = zg.spill(here, bucket, there)

Safe because nothing reads a reduced gradient but the graph's output, which then returns what stands for it there,
or puts its tile beside the others, which is done there.
"""

from __future__ import annotations

import operator

from torch import fx

from zerograph.core.plan import Bucket, Plan
from zerograph.graph.nodes import BucketFact, call, move_users_after
from zerograph.graph.ops import SPILL, WAIT_REDUCE


def spill(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite the backward graph ``gm`` in place; returns the number of spills inserted."""
    moved = 0
    for wait in gm.graph.find_nodes(op="call_function", target=WAIT_REDUCE, sort=True):
        bucket: Bucket = plan.buckets[wait.args[2]]  # type: ignore[index]
        if bucket.placement.spilled != "device":
            moved += _spill(gm.graph, wait, bucket)
    return moved


def _spill(graph: fx.Graph, wait: fx.Node, bucket: Bucket) -> bool:
    transfer: BucketFact = wait.meta["zg"]
    # Unsharded parameters stay on the device.
    results = sorted((n for n in wait.users if transfer.params[n.args[1]].sharded), key=lambda n: n.args[1])  # type: ignore[index, arg-type, return-value]
    if not results:
        return False
    if transfer.tiles > 1:
        _spill_tile(graph, results[0], transfer)
        return True
    with graph.inserting_after(max(wait.users)):
        node = call(graph, SPILL, (results, bucket.index), [n.meta["val"] for n in results], wait)
    node.meta["zg"] = BucketFact(bucket.index, tuple(transfer.params[n.args[1]] for n in results))  # type: ignore[index]
    place = node
    for k, result in enumerate(results):
        with graph.inserting_after(place):
            place = call(graph, operator.getitem, (node, k), result.meta["val"], result)
        for user in [u for u in result.users if u is not node]:
            user.replace_input_with(result, place)
        move_users_after(place)
    return True


def _spill_tile(graph: fx.Graph, result: fx.Node, transfer: BucketFact) -> None:
    """To where the tiles before it went, in place of what puts it beside them here."""
    (place,) = result.users
    _, into, *_ = place.args
    with graph.inserting_before(place):
        node = call(graph, SPILL, ([result], transfer.bucket, into), [place.meta["val"]], place)
        there = call(graph, operator.getitem, (node, 0), place.meta["val"], place)
    node.meta["zg"] = transfer
    place.replace_all_uses_with(there)
    graph.erase_node(place)
