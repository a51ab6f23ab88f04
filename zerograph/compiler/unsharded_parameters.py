"""Lets a forward that loops over ``self.parameters()`` compute with unsharded parameters.

Such a loop, for a penalty on all weights, gets the sharded ones, which torch does not mix with other tensors, and whose
gradients pass by the reduction. Where a graph reads a parameter as an attribute too, its marker gives the full tensor,
and takes the shard's place in whatever else is computed with it. Safe because in a forward both stand for the same
values; the mean over ranks of their gradients is that of plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor

from zerograph.core.errors import UnsupportedError
from zerograph.graph.nodes import CHECKPOINT, markers
from zerograph.graph.ops import UNSHARD

_OF_SHARDS = {"to_local", "prim_to_local", "full_tensor", "redistribute", "from_local", "prim_redistribute"}
"""Methods that are called only by code that knows of shards."""

_READS = {UNSHARD, CHECKPOINT}
"""Operators that read the whole of an input shard already: a checkpointed region has markers of its own."""


def compute_with_unsharded(gm: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Give the full tensor to whatever computes with a parameter beside its marker, in a graph as Dynamo recorded it.

    Returns:
        How many parameters were computed with as shards.
    """
    unsharded = {marker.source: marker.node for marker in reversed(markers(gm.graph, UNSHARD))}
    placeholders, known, changed = gm.graph.find_nodes(op="placeholder"), _nodes_that_know(gm), 0
    for shard, value in zip(placeholders, inputs, strict=True):
        reads = [user for user in shard.users if user in unsharded]
        marker = unsharded.get(reads[0] if reads else shard)
        others = [user for user in shard.users if user not in known and user.target not in _READS]
        if marker is None or not others:
            continue
        for node in (marker, *reads[:1]):
            placeholders[-1].append(node)
        full = marker
        if marker.args[4] != value.dtype:
            with gm.graph.inserting_after(marker):
                full = gm.graph.call_method("to", (marker, value.dtype))
        for user in others:
            user.replace_input_with(shard, full)
        changed += 1
    if changed:
        gm.graph.lint()
        gm.recompile()
    return changed


def _nodes_that_know(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that ask something of a shard, and those whose values they ask it of; their own code deals with shards."""
    known: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if getattr(node.target, "__name__", node.target) in _OF_SHARDS or not known.isdisjoint(node.users):
            known.add(node)
    return known


@contextmanager
def explaining_mixtures(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Say which code computes with shards, where torch says that it cannot mix them with other tensors."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        placeholders = gm.graph.find_nodes(op="placeholder")
        shards = [node for node, value in zip(placeholders, inputs, strict=True) if isinstance(value, DTensor)]
        users = (user for node in shards for user in node.users if user.target is not UNSHARD)
        places = [user.stack_trace for user in users if user.stack_trace]
        raise UnsupportedError(
            "the forward computes with parameters that are split over ranks, which torch does not mix with other "
            f"tensors:\n{places[0].rstrip() if places else error}",
            "read weights as attributes (module.weight), which are whole in a forward; let the optimizer decay them "
            "(weight_decay=); or compute the term outside of the model, with zerograph.norms or full_tensor()",
        ) from error
