"""The passes, in order. Each carries out a part of the plan on an FX graph and decides nothing.

A pass may expect a valid graph and leaves a valid graph. The pipelines are data: print them, or run one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from zerograph.core.plan import Plan
from zerograph.passes.canonicalize import canonicalize
from zerograph.passes.gather import gather
from zerograph.passes.hoist import hoist
from zerograph.passes.localize import localize
from zerograph.passes.name_activations import name_activations
from zerograph.passes.order_saved import order_saved
from zerograph.passes.prefetch import prefetch
from zerograph.passes.recompute import recompute
from zerograph.passes.reduce import reduce
from zerograph.passes.verify import verify, verify_all_reduced

GraphPass = Callable[[fx.GraphModule, Plan], int]

GRAPH_PASSES: tuple[tuple[str, GraphPass], ...] = (
    ("gather", gather),
    ("prefetch", prefetch),
    ("reduce", reduce),
    ("verify", verify),
)
"""What happens to a forward, backward or inference graph after partitioning."""

__all__ = [
    "GRAPH_PASSES",
    "GraphPass",
    "canonicalize",
    "gather",
    "hoist",
    "localize",
    "name_activations",
    "order_saved",
    "prefetch",
    "recompute",
    "reduce",
    "verify",
    "verify_all_reduced",
]
