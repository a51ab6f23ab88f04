"""Save shards for the backward, never gathered parameters.

Tags every ``unshard`` marker, and every cheap operator that reads nothing but parameters (views, casts), as
MUST_RECOMPUTE before the partitioner runs. The backward then starts from the shard, which is alive anyway, and gathers
again; whether that costs a collective is a matter of residency, decided by the runtime's cache.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.ops import UNSHARD
from zerograph.passes.graph import is_size, is_view

aten = torch.ops.aten

_CASTS = frozenset({aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default})

# A recomputed node that feeds a checkpointed region of a higher number would be saved by the partitioner.
_LAST_REGION = 1 << 30


def recompute(gm: fx.GraphModule) -> int:
    """Tag parameter-only nodes of the joint graph ``gm``; returns how many were tagged. Edits metadata only."""
    tagged: set[fx.Node] = set()
    for node in gm.graph.nodes:
        inputs = [n for n in node.all_input_nodes if not is_size(n)]  # sizes are there in the backward too
        derived = bool(inputs) and all(n in tagged for n in inputs)
        if node.target is UNSHARD or (derived and _is_cheap(node)):
            tagged.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _LAST_REGION
    return len(tagged)


def _is_cheap(node: fx.Node) -> bool:
    return is_view(node) or node.target in _CASTS
