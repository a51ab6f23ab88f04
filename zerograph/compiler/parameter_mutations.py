"""Refuse code that changes parameters in place while it computes with them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from zerograph.core.errors import UnsupportedError
from zerograph.graph.ops import UNSHARD
from zerograph.runtime.torch_private import local_tensor

_EMBEDDINGS = {F.embedding, F.embedding_bag}  # with max_norm they write into their weight
_IN_PLACE = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}


def refuse_mutations(gm: fx.GraphModule) -> None:
    """Look for in-place operations on full parameters in a graph as Dynamo recorded it, and in what it checkpoints.

    The shards would not see them: what the graph changes is a gathered copy. Views of that are known by their memory,
    whichever operator made them.

    Raises:
        UnsupportedError: naming the parameter and the operation.
    """
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    markers = [node for graph in graphs for node in graph.find_nodes(op="call_function", target=UNSHARD)]
    # Dynamo has traced with a shard what `compute_with_unsharded` gives the full tensor to.
    full = {
        _memory(value.meta["example_value"]): str(node.args[2]) for node in markers for value in (node, node.args[0])
    }
    full.pop(None, None)  # of a value that has no memory of its own
    for node in (node for graph in graphs for node in graph.nodes) if full else ():
        for changed in _changed(node):
            memory = _memory(changed.meta.get("example_value"))
            if memory in full:
                raise UnsupportedError(
                    f"the compiled code changes parameter {full[memory]} in place ({_name(node)}), which would be lost",
                    "change it outside of the model's forward, in `with zerograph.gathered(module, writeback=True):`",
                )


def _memory(value: Any) -> int | None:
    """The memory of a value that Dynamo traced with; views share it."""
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return local_tensor(value).untyped_storage()._cdata if strided else None


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    """The values that ``node`` writes into."""
    changed = [node.kwargs.get("out")]
    if node.args and (_is_in_place(node) or node.kwargs.get("inplace")):
        changed.append(node.args[0])
    if node.target in _EMBEDDINGS and _argument(node, 3, "max_norm") is not None:
        changed.append(_argument(node, 1, "weight"))
    for value in changed:
        # torch's operators on lists, as _foreach_mul_, write into each of the first one.
        yield from (
            each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, fx.Node)
        )


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _is_in_place(node: fx.Node) -> bool:
    name = _name(node)
    # torch's in-place operators end with one underscore; `__add__` and its like end with two.
    return node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _name(node: fx.Node) -> str:
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))
