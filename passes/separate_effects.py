"""Give each operator with effects a token of its own, right before it.

AOTAutograd keeps such operators (checks of ``torch.linalg``, prints) in order by one token, which goes from each to the
next. It makes that token before the graph's inputs, where a gather may be put, and a segment cannot hand it on. Safe
because a program and its segments keep the order of the graph, and Inductor orders effects without tokens.
"""

from __future__ import annotations

import operator

from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import call
from zerograph.graph.torch_private import MAKE_TOKEN, SINK_TOKENS, WITH_EFFECTS


def separate_effects(gm: fx.GraphModule, _plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of operators with effects."""
    graph = gm.graph
    for sink in graph.find_nodes(op="call_function", target=SINK_TOKENS):
        graph.erase_node(sink)
    found = list(graph.find_nodes(op="call_function", target=WITH_EFFECTS))
    for node in reversed(found):
        for token in [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]:
            graph.erase_node(token)  # the operator behind it has read it, and has another by now
        given: fx.Node = node.args[0]  # type: ignore[assignment]
        with graph.inserting_before(node):
            node.update_arg(0, call(graph, MAKE_TOKEN, (), given.meta["val"], node))
        with graph.inserting_after(node):
            token = call(graph, operator.getitem, (node, 0), given.meta["val"], node)
        with graph.inserting_after(token):
            call(graph, SINK_TOKENS, ([token],), None, node)  # else nobody reads the operator, and it is left out
    for token in graph.find_nodes(op="call_function", target=MAKE_TOKEN):
        if not token.users:
            graph.erase_node(token)
    return len(found)
