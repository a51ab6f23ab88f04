"""Give what the forward makes names that last, so that a plan can speak of single activations.

It runs before anything else looks at the graph, and once: later passes, and Inductor's, change nodes, and numbers of
those that are alike would change with them. A node that they replace loses its name, and no plan can save it. Safe
because it edits metadata only.
"""

from __future__ import annotations

import operator

from torch import fx

from zerograph.core.plan import Plan
from zerograph.core.step import activation_names, layers_of
from zerograph.graph.layers import module_of
from zerograph.graph.nodes import Activation, backward_nodes, is_size
from zerograph.graph.ops import UNSHARD


def name_activations(gm: fx.GraphModule, plan: Plan | None = None) -> int:
    """Leave an :class:`~zerograph.graph.nodes.Activation` on the forward's operators; returns how many were named.

    Reads no plan.
    """
    backward = backward_nodes(gm.graph)
    forward = [
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and node not in backward and node.target is not UNSHARD and not is_size(node)
    ]
    modules = [module_of(node) or "" for node in forward]
    places = zip(modules, layers_of(modules), (str(node.target) for node in forward), strict=True)
    for node, name in zip(forward, activation_names(places), strict=True):
        owner = node.args[0] if node.target is operator.getitem else None
        fact = owner.meta.get("zg") if isinstance(owner, fx.Node) else None
        node.meta["zg"] = fact if isinstance(fact, Activation) else Activation(name)
    return len(forward)
