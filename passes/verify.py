"""Check a rewritten graph against the invariants of the design; edits nothing.

Every gather is waited for once and freed once, nothing reads a bucket outside wait and free, no bucket is gathered
twice at a time, at most ``prefetch + 1`` buckets or tiles are unsharded, each gradient is reduced once, and no marker
is left.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence

from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import BucketFact, broken, is_view, markers
from zerograph.graph.ops import FREE, GATHER, REDUCE, REDUCE_GRAD, UNSHARD, WAIT_GATHER, WAIT_REDUCE


def verify(gm: fx.GraphModule, plan: Plan) -> int:
    """Returns the number of ``zg::`` nodes checked.

    Raises:
        InvariantError: naming the node, the parameters and the user's source line.
    """
    for target in (UNSHARD, REDUCE_GRAD):
        for marker in markers(gm.graph, target):
            raise broken(marker.node, f"the marker of {marker.name} was not rewritten")
    checked = _check_gathers(gm.graph, plan)
    return checked + _check_reductions(gm.graph, plan)


def _check_gathers(graph: fx.Graph, plan: Plan) -> int:
    # One operator that reads parameters of several buckets needs them all at once.
    limit = max([plan.prefetch + 1, *(len(_buckets_read(n)) for n in graph.nodes if n.target is not FREE)])
    unsharded: dict[tuple[object, ...], fx.Node] = {}
    waited: set[fx.Node] = set()
    freed: set[fx.Node] = set()
    checked = 0
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if _memory_of(source) in freed:
                raise broken(node, f"it reads {source.name} after it was freed")
        if node.target is GATHER:
            part = node.args[1:]
            if part in unsharded:
                raise broken(node, f"{_name(part)} is gathered twice at a time")
            if len(unsharded) >= limit:
                raise broken(node, f"{len(unsharded) + 1} buckets would be whole, at most {limit} may")
            unsharded[part] = node
        elif node.target is WAIT_GATHER:
            if node.args[0] in waited:
                raise broken(node, f"{_name(node.args[2:])} is waited for twice")
            waited.add(node.args[0])
        elif node.target is FREE:
            gather = unsharded.pop(part := node.args[1:], None)
            if gather is None:
                raise broken(node, f"{_name(part)} is freed and was not gathered")
            if gather not in waited:
                raise broken(node, f"{_name(part)} is freed and was not waited for")
            freed.update(results := {n for wait in gather.users for n in wait.users if n.target is operator.getitem})
            if results != set(node.args[0]):
                raise broken(node, f"{_name(part)} is freed in part: {len(node.args[0])} of {len(results)}")
        checked += node.target in (GATHER, WAIT_GATHER, FREE)
    for part, node in unsharded.items():
        raise broken(node, f"{_name(part)} is never freed")
    return checked


def _name(part: Sequence[object]) -> str:
    return f"bucket {part[0]}" + "".join(f", tile {tile}," for tile in part[1:])


def _buckets_read(node: fx.Node) -> set[object]:
    sources = (_memory_of(source) for source in node.all_input_nodes)
    waits = (n.args[0] for n in sources if n.target is operator.getitem)
    return {w.args[2:] for w in waits if isinstance(w, fx.Node) and w.target is WAIT_GATHER}


def _memory_of(node: fx.Node) -> fx.Node:
    """``node``, or what it is a view of."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _check_reductions(graph: fx.Graph, plan: Plan) -> int:
    started: Counter[tuple[str, int, int]] = Counter()
    under_way = 0
    for node in graph.nodes:
        under_way += (node.target is REDUCE) - (node.target is WAIT_REDUCE)
        if under_way > plan.reductions:
            raise broken(node, f"{under_way} reductions are under way, at most {plan.reductions} may be")
    nodes = graph.find_nodes(op="call_function", target=REDUCE)
    for node in nodes:
        fact: BucketFact = node.meta["zg"]
        started.update((p.name, fact.tile, fact.term) for p in fact.params)
        if [u.target for u in node.users] != [WAIT_REDUCE]:
            raise broken(node, "a reduction must be waited for exactly once")
    for node in nodes:
        fact = node.meta["zg"]
        for param in fact.params:
            times = started[param.name, fact.tile, fact.term]
            if times != 1:
                raise broken(node, f"the gradient of {param.name} is reduced {times} times")
    return 2 * len(nodes)
