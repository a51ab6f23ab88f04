"""Check a rewritten graph against the invariants of the design; edits nothing.

Every gather is waited for once and freed once, nothing reads a bucket outside wait and free, no bucket is gathered
twice at a time, at most ``prefetch + 1`` buckets are whole, each gradient is reduced once, and no marker is left.
"""

from __future__ import annotations

import operator
import re
from collections import Counter

from torch import fx

from zerograph.errors import InvariantError
from zerograph.ops import FREE, GATHER, REDUCE, REDUCE_GRAD, UNSHARD, WAIT_GATHER, WAIT_REDUCE
from zerograph.passes.graph import is_view, markers
from zerograph.plan import Plan


def verify(gm: fx.GraphModule, plan: Plan) -> int:
    """Returns the number of ``zg::`` nodes checked.

    Raises:
        InvariantError: naming the node, the parameters and the user's source line.
    """
    for target in (UNSHARD, REDUCE_GRAD):
        for marker in markers(gm.graph, target):
            raise _broken(marker.node, f"the marker of {marker.name} was not rewritten")
    checked = _check_gathers(gm.graph, plan)
    return checked + _check_reductions(gm.graph)


def _check_gathers(graph: fx.Graph, plan: Plan) -> int:
    # One operator that reads parameters of several buckets needs them all at once.
    limit = max([plan.prefetch + 1, *(len(_buckets_read(n)) for n in graph.nodes if n.target is not FREE)])
    whole: dict[int, fx.Node] = {}
    freed: set[fx.Node] = set()
    checked = 0
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source in freed:
                raise _broken(node, f"it reads {source.name} after it was freed")
        if node.target is GATHER:
            bucket = node.args[1]
            if bucket in whole:
                raise _broken(node, f"bucket {bucket} is gathered twice at a time")
            if len(whole) >= limit:
                raise _broken(node, f"{len(whole) + 1} buckets would be whole, at most {limit} may")
            whole[bucket] = node
        elif node.target is FREE:
            if whole.pop(node.args[1], None) is None:
                raise _broken(node, f"bucket {node.args[1]} is freed and was not gathered")
            freed.update(node.args[0])
        checked += node.target in (GATHER, WAIT_GATHER, FREE)
    for bucket, node in whole.items():
        raise _broken(node, f"bucket {bucket} is never freed")
    return checked


def _buckets_read(node: fx.Node) -> set[object]:
    return {bucket for source in node.all_input_nodes for bucket in _bucket_behind(source)}


def _bucket_behind(node: fx.Node) -> set[object]:
    """The bucket that ``node`` is a full parameter of, or a view of one."""
    while node.args and isinstance(node.args[0], fx.Node) and (is_view(node) or node.target is operator.getitem):
        node = node.args[0]
    return {node.args[2]} if node.target is WAIT_GATHER else set()


def _check_reductions(graph: fx.Graph) -> int:
    started: Counter[str] = Counter()
    nodes = graph.find_nodes(op="call_function", target=REDUCE)
    for node in nodes:
        started.update(p.name for p in node.meta["zg"].params)
        if [u.target for u in node.users] != [WAIT_REDUCE]:
            raise _broken(node, "a reduction must be waited for exactly once")
    for node in nodes:
        for param in node.meta["zg"].params:
            if started[param.name] != 1:
                raise _broken(node, f"the gradient of {param.name} is reduced {started[param.name]} times")
    return 2 * len(nodes)


def _broken(node: fx.Node, what: str) -> InvariantError:
    params = ", ".join(p.name for p in node.meta["zg"].params) if "zg" in node.meta else "-"
    lines = re.findall(r'File "[^"]+", line \d+', node.meta.get("stack_trace") or "")
    where = lines[-1] if lines else "unknown source line"
    return InvariantError(
        f"{node.name}: {what} (parameters: {params}; {where})\n  {node.prev}\n  {node.format_node()}\n  {node.next}",
        "this is a bug in ZeroGraph; please report it with this message",
    )
