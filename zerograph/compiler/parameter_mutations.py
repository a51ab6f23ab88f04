"""Refuse code that changes parameters in place while it computes with them."""

from __future__ import annotations

import operator
from typing import Any

import torch.nn.functional as F
from torch import fx

from zerograph.core.errors import UnsupportedError
from zerograph.graph.ops import UNSHARD

_VIEWS = {"t", "T", "view", "view_as", "transpose", "permute", "detach", "data", "narrow", "unsqueeze", "squeeze"}
_VIEWS |= {"expand", "flatten", "reshape", "select", "diagonal", "mT", "getitem", "getattr", "__getitem__"}
_EMBEDDINGS = {F.embedding, F.embedding_bag}  # with max_norm they write into their weight
_IN_PLACE = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}


def refuse_mutations(gm: fx.GraphModule) -> None:
    """Look for in-place operations on full parameters in a graph as Dynamo recorded it.

    The shards would not see them: what the graph changes is a gathered copy.

    Raises:
        UnsupportedError: naming the parameter and the operation.
    """
    full: dict[fx.Node, str] = {n: str(n.args[2]) for n in gm.graph.find_nodes(op="call_function", target=UNSHARD)}
    # Views and in-place operators write to the same memory: they are followed from the markers on.
    for node in gm.graph.nodes if full else ():
        changed = node.kwargs.get("out") or (node.args[0] if node.args and _is_in_place(node) else None)
        if node.target in _EMBEDDINGS and _argument(node, 3, "max_norm") is not None:
            changed = _argument(node, 1, "weight")
        if isinstance(changed, fx.Node) and changed in full:
            raise UnsupportedError(
                f"the compiled code changes parameter {full[changed]} in place ({_name(node)}), which would be lost",
                "change it outside of the model's forward, in `with zerograph.gathered(module, writeback=True):`",
            )
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in full and _name(node) in _VIEWS:
            full[node] = full[source]


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _is_in_place(node: fx.Node) -> bool:
    name = _name(node)
    # torch's in-place operators end with one underscore; `__add__` and its like end with two.
    return node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _name(node: fx.Node) -> str:
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))
