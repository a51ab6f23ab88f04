"""Check that a backward reduces the gradient of every trainable parameter; edits nothing.

A gradient that no reduction takes in would be this rank's own: parameters would drift apart without an error.
"""

from __future__ import annotations

from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import broken
from zerograph.graph.ops import REDUCE


def verify_reduced(backward: fx.GraphModule, plan: Plan) -> int:
    """Returns the number of gradients that are reduced.

    Raises:
        InvariantError: naming the first parameter whose gradient is not.
    """
    starts = backward.graph.find_nodes(op="call_function", target=REDUCE)
    reduced = {p.name for node in starts for p in node.meta["zg"].params}
    for param in (p for bucket in plan.buckets for p in bucket.params):
        if plan.ranks > 1 and param.trainable and param.name not in reduced:
            raise broken(next(iter(reversed(backward.graph.nodes))), f"the gradient of {param.name} is not reduced")
    return len(reduced)
