"""Which rows of a table a lookup asks for, where the table is in tiles: in which tile each is, and where.

A tile is the same slice of every rank's shard (:mod:`zerograph.passes.tile`), so that row ``r`` of the table is row
``r % chunk`` of the shard of rank ``r // chunk``, and a tile has the ranks' slices one behind the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerograph.core.plan import ParamTile
from zerograph.graph.nodes import call, computed, part_of

aten, prims = torch.ops.aten, torch.ops.prims


class TableRows:
    """The rows that ``ids`` names, of a table of which every rank has ``chunk`` rows at most."""

    def __init__(self, graph: fx.Graph, ids: fx.Node, chunk: int, like: fx.Node) -> None:
        """Inserts what all tiles share; ``like`` tells the source line."""
        self.graph, self.like = graph, like
        self.rank = self._call(aten.div.Tensor_mode, ids, chunk, rounding_mode="floor")
        self.row = self._call(aten.sub.Tensor, ids, self._call(aten.mul.Tensor, self.rank, chunk))
        self.numbers = _range(graph, chunk, ids, like)

    def in_tile(self, param: ParamTile) -> tuple[fx.Node, fx.Node]:
        """Inserts, and returns, whether a tile has each row [..., 1], and where in the tile it is [...]."""
        count = param.end - param.begin
        # A view of 0, 1, 2, ...: as a number it would lie in the tile's segment, and no two tiles would share one.
        begin = part_of(self.graph, self.numbers, 0, param.begin, param.begin + 1, self.like)
        own = self._call(aten.sub.Tensor, self.row, begin)
        inside = self._call(
            aten.bitwise_and.Tensor, self._call(aten.ge.Scalar, own, 0), self._call(aten.lt.Scalar, own, count)
        )
        where = self._call(aten.add.Tensor, self._call(aten.mul.Tensor, self.rank, count), own)
        return self._call(aten.unsqueeze.default, inside, -1), where

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return computed(self.graph, target, args, self.like, kwargs)


def checked(graph: fx.Graph, ids: fx.Node, rows: int, like: fx.Node) -> fx.Node:
    """Insert a lookup of ``ids`` among 0 to ``rows``: an index that is none of them is the error that it always is."""
    numbers = computed(graph, aten.unsqueeze.default, (_range(graph, rows, ids, like), 1), like)
    found = computed(graph, aten.embedding.default, (numbers, ids), like)
    return computed(graph, aten.squeeze.dim, (found, -1), like)


def _range(graph: fx.Graph, end: int, ids: fx.Node, like: fx.Node) -> fx.Node:
    val = ids.meta["val"].new_empty(end)
    node = call(graph, prims.iota.default, (end,), val, like)
    node.kwargs = {"start": 0, "step": 1, "dtype": val.dtype, "device": val.device, "requires_grad": False}
    return node
