"""Turn the markers of unsharded parameters into casts, or into nothing.

At stage 0, at world size 1 without offload, and for scalars and parameters with fewer rows than ranks there is nothing
to gather; at world size 1 there is nothing to reduce either. Safe because such a marker is the identity up to its
dtype. Reductions over several ranks stay: they become all-reduces.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import markers
from zerograph.graph.ops import REDUCE_GRAD, UNSHARD


def localize(gm: fx.GraphModule, plan: Plan | None = None) -> int:
    """Rewrite the joint (or inference) graph ``gm`` in place; returns the number of markers removed. Reads no plan."""
    local = [(m, m.dtype) for m in markers(gm.graph, UNSHARD) if not m.sharded]
    local += [(m, m.node.meta["val"].dtype) for m in markers(gm.graph, REDUCE_GRAD) if not (m.group or m.sharded)]
    for marker, dtype in local:
        _become_cast(gm.graph, marker.node, marker.source, dtype)
    return len(local)


def _become_cast(graph: fx.Graph, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> None:
    replacement = source
    if source.meta["val"].dtype != dtype:
        with graph.inserting_before(node):
            replacement = graph.call_function(torch.ops.prims.convert_element_type.default, (source, dtype))
        replacement.meta = {k: v for k, v in node.meta.items() if k not in ("recompute", "ac_graph_id")}
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
