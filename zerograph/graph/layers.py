"""Where repeated layers begin in a graph: there a cut costs nothing.

A cut where a layer begins costs no fusion worth having, as little more than the residual stream crosses it, and it
makes the segments of a layer the same in every layer, so that a deep model compiles in the time of one.
"""

from __future__ import annotations

import operator
import re

from torch import fx

from zerograph.core import step
from zerograph.graph.ops import INSTRUCTIONS, REDUCE_GRAD, UNSHARD
from zerograph.graph.torch_private import LOOKUP_SEED, SEEDS

_LEAST = 16
"""Operations between two cuts, at least: what a compiler has to fuse in less is worth more than a cut."""

_MODEL = "L['self']"
"""Dynamo's name of the module that was compiled, where its ``forward`` calls it ``self``."""
_ROOT = re.compile(r"[LG]\['\w+'\](\[\d+\])?(?=\.|$)")
"""A module in a local or global variable, or in a tuple there, where Dynamo's name of one begins."""


def name_model(gm: fx.GraphModule) -> int:
    """Give modules the names of their parameters where they are reached through another variable than ``self``.

    Dynamo names a module by the variable that it found it through: ``L['model'].blocks.0`` in a function that is
    compiled, ``L['s'].blocks.0`` where a method calls its first argument ``s``, ``L['args'][0].blocks.0`` where a
    decorator passes all on. Where all modules of the graph are found through one variable, it holds the model, and its
    name becomes that which :func:`module_of` leaves out. Where there are several, as in a step of teacher and student,
    names stay as they are. Only names change; needs Dynamo's graph, whose nodes the joint graph has its names from.

    Returns:
        The number of nodes that got another name.
    """
    nodes = [n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    named = [n for n in nodes if n.meta.get("nn_module_stack")]
    roots = {_root_of(path) for n in named for path, _ in n.meta["nn_module_stack"].values()}
    root = next(iter(roots), None)
    if root in (None, _MODEL) or len(roots) > 1:
        return 0
    for n in named:
        stack = n.meta["nn_module_stack"]
        n.meta["nn_module_stack"] = {
            key: (_ROOT.sub(_MODEL, path, count=1), kind) for key, (path, kind) in stack.items()
        }
    return len(named)


def _root_of(path: str) -> str | None:
    found = _ROOT.match(path)
    return found[0] if found else None


def module_of(node: fx.Node) -> str | None:
    """The module that ``node`` computes, or whose gradient (``blocks.3.mlp``); None when tracing left no word of it.

    An empty string for the model itself.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    # The innermost module comes last.
    path, _ = list(stack.values())[-1]
    return path.removeprefix(_MODEL).removeprefix(".")  # type: ignore[no-any-return]


def layer_of_node(node: fx.Node) -> str | None:
    """The repeated layer that ``node`` computes, or whose gradient (``blocks.3``).

    An empty string outside of repeated layers; None when tracing left no word of the module.
    """
    module = module_of(node)
    return None if module is None else step.layer_of(module)


def layer_starts(graph: fx.Graph) -> list[fx.Node]:
    """The computing nodes at which a repeated layer begins, and what follows the last one; empty without layers.

    Several layers that are short begin where the first of them does.
    """
    nodes = [n for n in graph.nodes if _computes(n)]
    layers = [layer_of_node(n) for n in nodes]
    last = max((i for i, layer in enumerate(layers) if layer), default=len(layers))
    begun: set[str] = set()
    starts: list[fx.Node] = []
    length = 0  # of the layer so far
    for i, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
        # An operation outside of layers begins something behind the last one only; before that it belongs to the layer.
        if layer is not None and layer not in begun and (layer or i > last):
            begun.add(layer)
            if length >= _LEAST or not starts:
                starts.append(node)
                length = 0
        length += 1
    return starts


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in _NO_PLACE


# What moves to where its argument is, whichever layer it belongs to.
_NO_PLACE = INSTRUCTIONS | SEEDS | {UNSHARD, REDUCE_GRAD, operator.getitem, LOOKUP_SEED}
