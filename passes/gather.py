"""Replace ``unshard`` markers by gathers of whole buckets, each freed after its last use.

The uses of a bucket fall into *intervals*: stretches of the graph in which the bucket stays unsharded. A bucket whose
next use lies beyond ``plan.prefetch`` other buckets (tied weights: the embedding at the start, the head at the end) is
freed and gathered again, so that at most ``prefetch + 1`` buckets are ever unsharded. A tile counts as a bucket. Each
interval becomes

    pending = zg.gather(shards, bucket); full = zg.wait_gather(pending, shards, bucket); ...; zg.free(full, bucket)

with the free at the next interval's start, so that an interval costs one cut of the graph, or none where it begins with
a repeated layer. Views of parameters move to their users, so that none outlives its bucket. Safe because the shards do
not change within a graph.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from zerograph.core.plan import Plan
from zerograph.core.prefetching import interval_numbers
from zerograph.graph.descent import descend
from zerograph.graph.layers import layer_starts
from zerograph.graph.nodes import (
    BucketFact,
    Marker,
    call,
    is_view,
    markers,
    output_of,
    part_of_plan,
    positions,
    protect_outputs,
    transfer_of,
    with_views,
)
from zerograph.graph.ops import FREE, GATHER, UNSHARD, WAIT_GATHER


@dataclass(slots=True)
class _MarkedInterval:
    """A stretch in which ``bucket`` is unsharded: what uses it, in order, and the marker that each reads."""

    bucket: int
    uses: list[tuple[fx.Node, Marker]] = field(default_factory=list)

    @property
    def first(self) -> fx.Node:
        return self.uses[0][0]

    @property
    def last(self) -> fx.Node:
        return self.uses[-1][0]


def gather(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of gathers inserted."""
    found = markers(gm.graph, UNSHARD)
    if not found:
        return 0
    protect_outputs(gm.graph)  # again: Inductor's joint passes take the copies for superfluous
    _sink_views(gm.graph, found)
    intervals = _unsharded_intervals(gm.graph, found, plan)
    _insert(gm.graph, intervals, plan)
    for marker in found:
        gm.graph.erase_node(marker.node)
    return len(intervals)


def _sink_views(graph: fx.Graph, found: list[Marker]) -> None:
    """Give every non-view user its own copy of the views between it and the marker, right before it."""

    def sink(node: fx.Node) -> Iterator[tuple[fx.Node]]:
        for user in [user for user in node.users if is_view(user)]:
            yield (user,)
            for consumer in list(user.users):
                with graph.inserting_before(consumer):
                    # A copy for each reader: one view shared by two intervals would keep the first one's memory alive.
                    copy = graph.node_copy(user, lambda n: n)
                consumer.replace_input_with(user, copy)
            graph.erase_node(user)

    for marker in found:
        descend(sink, marker.node)


def _consumers(marker: fx.Node) -> Iterator[fx.Node]:
    """The computing users of a marker, behind views."""
    return (user for node in with_views(marker) for user in node.users if not is_view(user))


def _unsharded_intervals(graph: fx.Graph, found: list[Marker], plan: Plan) -> list[_MarkedInterval]:
    bucket_of = plan.bucket_of()
    order = positions(graph)
    uses = sorted(
        ((order[user], user, marker) for marker in found for user in _consumers(marker.node)), key=lambda use: use[0]
    )
    parts = [part_of_plan(marker, bucket_of[marker.name]) for _, _, marker in uses]
    intervals: dict[int, _MarkedInterval] = {}
    for number, part, (_, user, marker) in zip(interval_numbers(parts, plan.prefetch), parts, uses, strict=True):
        intervals.setdefault(number, _MarkedInterval(part[0])).uses.append((user, marker))
    return list(intervals.values())


def _insert(graph: fx.Graph, intervals: list[_MarkedInterval], plan: Plan) -> None:
    order = positions(graph)
    starts = _starts(graph, intervals)
    cuts: dict[int, fx.Node] = {}
    frees: list[tuple[_MarkedInterval, list[fx.Node], BucketFact]] = []
    for i, interval in enumerate(intervals):
        one_each: dict[str, Marker] = {}  # uses of a tile have markers of their own
        for _, marker in interval.uses:
            one_each.setdefault(marker.name, marker)
        transfer = transfer_of([*one_each.values()], plan.buckets[interval.bucket])
        shards = [marker.source for marker in one_each.values()]
        with graph.inserting_before(starts[i]):
            pending = call(graph, GATHER, (shards, *transfer.part), shards[0].meta["val"].new_empty(0), starts[i])
            vals = [marker.node.meta["val"] for marker in one_each.values()]
            wait = call(graph, WAIT_GATHER, (pending, shards, *transfer.part), vals, starts[i])
            full = [call(graph, operator.getitem, (wait, k), val, starts[i]) for k, val in enumerate(vals)]
        unsharded = dict(zip(one_each, full, strict=True))
        pending.meta["zg"] = wait.meta["zg"] = transfer
        cuts[i] = pending
        for use, marker in interval.uses:
            _reroute(use, marker.node, unsharded[marker.name])
        frees.append((interval, full, transfer))
    # Not in the loop above: an interval is freed where a later one begins, which must stand there by now.
    for i, (interval, full, transfer) in enumerate(frees):
        later = next((k for k in range(i + 1, len(intervals)) if order[starts[k]] > order[interval.last]), None)
        with graph.inserting_before(cuts[later] if later is not None else output_of(graph)):
            free = call(graph, FREE, (full, *transfer.part), None)
        free.meta["zg"] = transfer


def _starts(graph: fx.Graph, intervals: list[_MarkedInterval]) -> list[fx.Node]:
    """Where each interval starts: with its layer, if nothing in that is used before, else right before its first
    use."""
    order = positions(graph)
    layers = layer_starts(graph)
    begins = [order[node] for node in layers]
    # A use before the first, so that each has one before it.
    uses = [-1, *sorted(order[use] for interval in intervals for use, _ in interval.uses)]
    starts = []
    for interval in intervals:
        first = order[interval.first]
        earlier = uses[bisect_left(uses, first) - 1]
        layer = bisect_right(begins, first) - 1
        starts.append(layers[layer] if layer >= 0 and begins[layer] > earlier else _first_view_before(interval))
    return starts


def _first_view_before(interval: _MarkedInterval) -> fx.Node:
    """Where an interval starts: its first use, or the copied views (of any bucket) that stand right before it."""
    node = interval.first
    while is_view(node.prev) and _reads_marker(node.prev):
        node = node.prev
    return node


def _reads_marker(node: fx.Node) -> bool:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node.target is UNSHARD


def _reroute(use: fx.Node, marker: fx.Node, tensor: fx.Node) -> None:
    """Let ``use`` read ``tensor`` where it read ``marker``, directly or through its own views."""
    readers = [use]
    for reader in readers:
        for source in list(reader.all_input_nodes):
            if source is marker:
                reader.replace_input_with(marker, tensor)
            elif is_view(source) and _reads_marker(source):
                readers.append(source)
