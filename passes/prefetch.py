"""Start each gather up to ``plan.prefetch`` intervals before its bucket is needed, or as few as its bucket says.

Moves ``zg.gather`` nodes up to the start of an earlier interval, after that interval's frees, and those of the first
interval to the very start. Safe because a gather reads only shards, which do not change within a graph; never moves one
so early that more than ``prefetch + 1`` buckets would be unsharded.
"""

from __future__ import annotations

from torch import fx

from zerograph.core.plan import Plan
from zerograph.core.prefetching import gather_starts
from zerograph.graph.ops import FREE, GATHER, WAIT_GATHER


def prefetch(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` in place; returns the number of gathers moved."""
    waits = list(gm.graph.find_nodes(op="call_function", target=WAIT_GATHER, sort=True))
    ends = _ends(gm.graph, waits)
    head = next(n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr") and n.target is not GATHER)
    parts = [wait.meta["zg"].part for wait in waits]
    ahead = plan.ahead()
    starts = gather_starts(parts, ends, plan.prefetch, [ahead[bucket] for bucket, *_ in parts])
    moved = 0
    for i, wait in enumerate(waits):
        start: fx.Node = wait.args[0]  # type: ignore[assignment]
        # A shard that the graph computes, as a view of an input, is not there at the very start.
        ready = all(n.op == "placeholder" for n in start.all_input_nodes)
        place = head if starts[i] == 0 and ready else waits[starts[i]]
        if starts[i] < i or place is head is not start.next:
            place.prepend(start)
            moved += 1
    return moved


def _ends(graph: fx.Graph, waits: list[fx.Node]) -> list[int]:
    """For each interval, the number of the interval at whose start it is freed."""
    end = {wait: len(waits) for wait in waits}
    index = 0
    for node in graph.nodes:
        if node.target is WAIT_GATHER:
            index += 1
        elif node.target is FREE:
            end[node.args[0][0].args[0]] = index  # type: ignore[index, union-attr]
    return [end[wait] for wait in waits]
