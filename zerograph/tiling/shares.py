"""A dimension that is divided among ranks, and of which each tile has the same part of every rank's share.

Seen as ``[..., ranks, share, ...]`` the part of a tile is one view; of one rank alone it is as it is. Where the last
ranks' shares are short, zeros pad them in that view; as only trailing shares are, what a tile has of all ranks is short
at its end, and can be cut there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.core.layout import largest
from zerograph.graph.nodes import call, computed, part_of
from zerograph.graph.ops import PLACE

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Shares:
    """A dimension of that ``size``, divided among ``ranks``."""

    graph: fx.Graph
    size: int
    ranks: int

    @property
    def share(self) -> int:
        """The largest that a rank has."""
        return largest(self.size, self.ranks)

    def wide(self, node: fx.Node, dim: int, *, copies: bool = False) -> fx.Node:
        """``node`` as ``[..., ranks, share, ...]``; with ``copies`` memory of its own."""
        lacking = self.ranks * self.share - self.size
        if lacking:
            node = self._padded(node, dim, lacking)
        elif copies or (self.ranks > 1 and not node.meta["val"].is_contiguous()):
            node = self._call(aten.clone.default, node, node, memory_format=torch.contiguous_format)
        return self._split(node, dim, self.share)

    def part(self, wide: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
        """A tile's part of every share in the result of :meth:`wide`, side by side, with what pads it."""
        if self.ranks == 1:
            return part_of(self.graph, wide, dim, begin, end, wide)
        part = part_of(self.graph, wide, dim + 1, begin, end, wide)
        dense = self._call(aten.clone.default, part, part, memory_format=torch.contiguous_format)
        return self._joined(dense, dim)

    def place(self, node: fx.Node, into: fx.Node | None, dim: int, begin: int, end: int) -> fx.Node:
        """Put a tile, with what pads it, beside the others, in what :meth:`full` takes."""
        parts, at = self._split(node, dim, end - begin), dim + (self.ranks > 1)
        shape, val = [-1] * parts.meta["val"].dim(), parts.meta["val"]
        shape[dim], shape[at] = self.ranks, self.share
        sizes = [own if size < 0 else size for size, own in zip(shape, val.shape, strict=True)]
        return call(self.graph, PLACE, ([parts], into, shape, at, begin), val.new_empty(sizes), node)

    def full(self, placed: fx.Node, dim: int) -> fx.Node:
        """All tiles, as one dimension again."""
        joined = self._joined(placed, dim)
        if self.size == self.ranks * self.share:
            return joined
        cut = self._call(aten.slice.Tensor, joined, joined, dim, 0, self.size)
        return self._call(aten.clone.default, cut, cut, memory_format=torch.contiguous_format)

    def _padded(self, node: fx.Node, dim: int, lacking: int) -> fx.Node:
        behind = node.meta["val"].dim() - dim - 1
        return self._call(aten.constant_pad_nd.default, node, node, [0, 0] * behind + [0, lacking])

    def _split(self, node: fx.Node, dim: int, share: int) -> fx.Node:
        if self.ranks == 1:
            return node
        shape = _sizes(node)
        return self._call(aten.view.default, node, node, [*shape[:dim], self.ranks, share, *shape[dim + 1 :]])

    def _joined(self, node: fx.Node, dim: int) -> fx.Node:
        if self.ranks == 1:
            return node
        shape = _sizes(node)
        joined = shape[dim] * shape[dim + 1]
        return self._call(aten.view.default, node, node, [*shape[:dim], joined, *shape[dim + 2 :]])

    def _call(self, target: Any, like: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        return computed(self.graph, target, args, like, kwargs)


def _sizes(node: fx.Node) -> list[int]:
    """The shape as a view is given it: a number of tokens that varies is left to it."""
    return [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
