"""Fetch the shards of buckets whose parameters live off the device, before they are gathered.

Stands behind the pass ``prefetch``: the fetch begins where that put the gather, up to ``plan.prefetch`` intervals
early, and the gather follows where its bucket is needed,

    pending = zg.fetch(shards, bucket); ...; here = zg.wait_fetch(pending, shards, bucket); zg.gather(here, bucket)

as a gather that waits for the disk would keep the device from computing. On an accelerator gathers have a stream of
their own: those of what comes from the host wait in it, and follow the fetch at once. Whether shards pass through the
host's memory on their way is lowering's to know.

Safe for the reason that a gather may move: shards do not change within a graph. The fetched shards belong to the gather
alone.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from zerograph.core.plan import Bucket, Param, ParamTile, Plan
from zerograph.graph.nodes import call
from zerograph.graph.ops import FETCH, GATHER, WAIT_FETCH


def fetch(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of fetches inserted."""
    offloaded = [
        gather
        for gather in gm.graph.find_nodes(op="call_function", target=GATHER, sort=True)
        if plan.buckets[gather.args[1]].placement.parameters != "device"  # type: ignore[index]
    ]
    for gather in offloaded:
        _fetch(gm.graph, gather, plan.buckets[gather.args[1]])  # type: ignore[index]
    return len(offloaded)


def _fetch(graph: fx.Graph, gather: fx.Node, bucket: Bucket) -> None:
    shards, transfer = gather.args[0], gather.meta["zg"]
    # Unsharded parameters stay on the device.
    there = [(k, shard) for k, shard in enumerate(shards) if transfer.params[k].sharded]  # type: ignore[arg-type, union-attr]
    if not there:
        return
    fetched = [shard for _, shard in there]
    params = tuple(transfer.params[k] for k, _ in there)
    vals = [_here(shard.meta["val"], p) for shard, p in zip(fetched, params, strict=True)]  # type: ignore[union-attr]
    with graph.inserting_before(gather):
        pending = call(graph, FETCH, (fetched, *transfer.part), gather.meta["val"], gather)
    (wait_gather,) = gather.users
    on_device = not wait_gather.meta["val"][0].is_cpu
    # The last tile may have to be padded, which computes.
    by_gather = on_device and bucket.placement.parameters == "host" and bucket.tiles == 1
    if not by_gather:
        wait_gather.prepend(gather)
    with graph.inserting_before(gather):
        wait = call(graph, WAIT_FETCH, (pending, fetched, *transfer.part), vals, gather)
        here = [call(graph, operator.getitem, (wait, k), val, gather) for k, val in enumerate(vals)]
    pending.meta["zg"] = replace(transfer, params=params)
    wait.meta["zg"] = replace(transfer, params=params, by_gather=by_gather)
    arrived = dict(zip((k for k, _ in there), here, strict=True))
    gather.args = ([arrived.get(k, shard) for k, shard in enumerate(shards)], *transfer.part)  # type: ignore[arg-type]


def _here(shard: Tensor, param: Param) -> Tensor:
    """The fake value of what is fetched of a shard."""
    rows = shard[param.begin : param.end] if isinstance(param, ParamTile) else shard
    return torch.empty_like(rows)
