"""Write a region of a graph once for each tile of its tokens, one tile after another.

A tile is views of what the region is given, its operators, and ends that put numbers per token in their place and add
up what is summed over tokens. Where tiles have one size they are one segment, since offsets are the views'. A product
that sums over tokens, a weight's gradient, is added to the sum as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zerograph.core.plan import token_tiles
from zerograph.graph.nodes import TokenTile, added, aten, call, computed, move_needed_before, part_of
from zerograph.graph.ops import PLACE
from zerograph.tiling.cuts import MEANS, Cut, Mixes
from zerograph.tiling.region import Region, copy_of_tile, memory_order

prims = torch.ops.prims


def write_tiles(graph: fx.Graph, region: Region, tiles: int) -> int:
    """Replace ``region`` by at most so many tiles; returns their number. Leaves what nothing reads any more.

    Raises:
        Mixes: the region reads one of several results of a kernel outside; nothing has changed then.
    """
    for node, source in region.given:
        # Attention that Inductor put in the place of products has no module: no region takes it for its layer's.
        if not isinstance(source.meta["val"], torch.Tensor):
            raise Mixes(node, "is of a kernel that is known of no layer, and runs for all {}s")
    cuts = token_tiles(region.count, tiles)
    _TokenLoop(graph, region, cuts, TokenTile(tiles)).write()
    return len(cuts)


class _TokenLoop:
    def __init__(self, graph: fx.Graph, region: Region, tiles: tuple[tuple[int, int], ...], fact: TokenTile) -> None:
        self.graph, self.region, self.tiles, self.fact = graph, region, tiles, fact
        self.flat: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self.vals: dict[tuple[fx.Node, int], Any] = {}

    def write(self) -> None:
        """Replace the region by its tiles."""
        exits = self.region.exits()
        full: dict[fx.Node, fx.Node | None] = dict.fromkeys(exits)
        with self.graph.inserting_before(self._place()):
            for begin, end in self.tiles:
                copies = copy_of_tile(self.region, end - begin, self._views(begin, end), self._insert(end - begin))
                for node in exits:
                    full[node] = self._end(node, copies[node], full[node], (begin, end))
            for node, made in full.items():
                assert made is not None  # there is a tile
                outside = self._as_before(node, made)
                node.replace_all_uses_with(outside, delete_user_cb=lambda user: user not in self.region.cuts)
        for node in reversed(self.region.nodes):
            self.graph.erase_node(node)

    def _place(self) -> fx.Node:
        """The node before which all tiles run: what they read moves before it, where that stands behind."""
        inside = self.region.cuts
        first = min(user for node in self.region.exits() for user in node.users if user not in inside)
        move_needed_before(first, inside.keys())
        return first

    def _insert(self, count: int) -> Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node]:
        """Inserts an operator for ``count`` tokens; what it makes is asked of fake tensors once for all such tiles."""

        def insert(node: fx.Node, args: tuple[Any, ...], named: dict[str, Any]) -> fx.Node:
            if (node, count) in self.vals:
                copy = call(self.graph, node.target, args, self.vals[node, count], node)
                copy.kwargs = named
            else:
                copy = computed(self.graph, node.target, args, node, named)
                self.vals[node, count] = copy.meta["val"]
            if "fwd_nn_module_stack" in node.meta:  # of a gradient, whose segment has its layer's name
                copy.meta["fwd_nn_module_stack"] = node.meta["fwd_nn_module_stack"]
            copy.meta["zg"] = self.fact
            return copy

        return insert

    def _views(self, begin: int, end: int) -> dict[tuple[fx.Node, Cut], fx.Node]:
        """A tile's part of each argument that is cut; all of them at once, as each ends a segment."""
        views: dict[tuple[fx.Node, Cut], fx.Node] = {}
        for (_, source), tokens in self.region.given.items():
            if (source, tokens) not in views:
                flat, places = self._flat(source, tokens), tokens.places(source)
                views[source, tokens] = part_of(self.graph, flat, tokens.dim, begin * places, end * places, source)
        return views

    def _flat(self, source: fx.Node, tokens: Cut) -> fx.Node:
        """``source`` with all tokens that the loss looks at in one dimension."""
        shape, counts_all = source.meta["val"].shape, self.region.counts_all(source, tokens)
        if len(tokens.dims) == 1 and not counts_all:
            return source
        if (source, tokens) not in self.flat:
            before = [d for d in range(tokens.dim) if d not in tokens.dims]
            behind = range(tokens.dim + 1, len(shape))
            found = source
            if len(tokens.runs()) > 1:
                found = computed(self.graph, aten.permute.default, (found, [*before, *tokens.dims, *behind]), source)
            if counts_all:
                found = self._in_window(found, [shape[d] for d in before], [shape[d] for d in behind])
            flat = tokens.of_part(shape, self.region.count)
            self.flat[source, tokens] = computed(self.graph, aten.reshape.default, (found, flat), source)
        return self.flat[source, tokens]

    def _in_window(self, source: fx.Node, before: list[int], behind: list[int]) -> fx.Node:
        """The tokens of ``source`` that the loss looks at; ``before`` and ``behind`` are the sizes around them."""
        window = self.region.window
        assert window is not None  # there are more tokens than the loss looks at
        viewed = computed(self.graph, aten.reshape.default, (source, [*before, *window.sizes, *behind]), source)
        args = (viewed, len(before) + window.dim, window.begin, window.end, window.step)
        return computed(self.graph, aten.slice.Tensor, args, source)

    def _among_zeros(self, made: fx.Node, dim: int) -> fx.Node:
        """``made``, the values of the tokens that the loss looks at, among zeros for all others."""
        window, val = self.region.window, made.meta["val"]
        assert window is not None
        kept, full = ([*val.shape[:dim], *sizes, *val.shape[dim + 1 :]] for sizes in (window.kept, window.sizes))
        viewed = computed(self.graph, aten.view.default, (made, kept), made)
        zeros = call(self.graph, aten.full.default, (full, 0), val.new_zeros(full), made)
        zeros.kwargs = {"dtype": val.dtype, "device": val.device}
        args = (zeros, viewed, dim + window.dim, window.begin, window.end, window.step)
        return computed(self.graph, aten.slice_scatter.default, args, made)

    def _end(self, node: fx.Node, made: tuple[fx.Node, ...], into: fx.Node | None, tile: tuple[int, int]) -> fx.Node:
        """Put what a tile made of ``node`` into that of all tiles."""
        tokens, terms, (begin, end) = self.region.cuts[node], list(made), tile
        if tokens is None:
            if node.target in MEANS:
                share = (end - begin) / self.region.count
                terms = [computed(self.graph, aten.mul.Tensor, (terms[0], share), node)]
            return added(self.graph, terms, into, node)
        if not tokens.dims:
            return into or terms[0]  # of all tiles
        val, places = node.meta["val"], tokens.places(node)
        shape, dim = tokens.of_part(val.shape, self.region.count * places), tokens.dim
        if (order := memory_order(val)) is not None and len(tokens.dims) == 1:
            terms = [computed(self.graph, aten.permute.default, (terms[0], order), node)]
            shape, dim = [shape[d] for d in order], order.index(dim)
        return call(self.graph, PLACE, (terms, into, shape, dim, begin * places), val.new_empty(shape), node)

    def _as_before(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """``made``, the result of the tiles, with the shape and dtype of ``node``."""
        val, tokens = node.meta["val"], self.region.cuts[node]
        if tokens is not None and not tokens.dims:
            return made
        if tokens is not None and (order := memory_order(val)) is not None and len(tokens.dims) == 1:
            back = [order.index(dim) for dim in range(len(order))]
            return computed(self.graph, aten.permute.default, (made, back), node)
        if tokens is not None and self.region.counts_all(node, tokens):
            made = self._among_zeros(made, tokens.dim)
        if made.meta["val"].shape != val.shape:
            made = computed(self.graph, aten.view.default, (made, list(val.shape)), node)
        if made.meta["val"].dtype != val.dtype:
            made = computed(self.graph, prims.convert_element_type.default, (made, val.dtype), node)
        return made
