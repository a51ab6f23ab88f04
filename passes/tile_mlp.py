"""Run the linear layers of an MLP, and what lies between them, in one loop over the hidden dimension.

Where a plan has the weights of an MLP in one loop, each tile gathers its part of every weight, and makes of it all that
has the hidden dimension (:mod:`zerograph.tiling.middle`): the middle is never whole.

    for each tile: up_i = zg.unshard(up's rows); down_i = zg.unshard(down's columns)
                   y = zg.accumulate([gelu(x @ up_i.T), down_i.T], y)

In the backward too, where the middle of a tile is computed again, as ``recompute`` says, and gradients of the weights
are reduced tile by tile. Gradients of biases, which are whole, are put together.

Safe because every operator of the middle treats each place of the hidden dimension by itself or sums over it, and sums
differ in their order only. Padding of the last shards is cut off before anything is computed from it. Stands before
``tile``, which takes the weights of an MLP one by one where a graph has no such middle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from zerograph.core.plan import Bucket, ParamTile, Plan, tile_params
from zerograph.graph.nodes import Marker, TileFact, added, aten, call, computed, is_view, move_needed_before
from zerograph.graph.ops import PLACE, REDUCE_GRAD, UNSHARD
from zerograph.tiling.middle import Gathered, Middle, middle_of
from zerograph.tiling.shares import Shares
from zerograph.tiling.token_region import PRODUCTS, SIZED, NotByToken

log = logging.getLogger(__name__)
prims = torch.ops.prims


def tile_mlp(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of tiles of all loops."""
    written, loops = 0, plan.loops()
    if not loops:
        return 0
    read = Gathered.of(gm.graph)
    for loop, buckets in loops.items():
        weights = {bucket.params[0].name: bucket.dim for bucket in buckets}
        try:
            middle = middle_of(read, weights)
        except NotByToken as error:
            log.warning(
                "%s was planned in one loop of %d tiles, and its weights are in tiles one by one, because %s",
                loop, buckets[0].tiles, error,
            )  # fmt: skip
            continue
        if middle.dims:
            written += _Loops(gm.graph, read, middle, buckets, plan.world_size).write()
    if written:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return written


class _Loops:
    """All loops over the hidden dimension of one MLP."""

    def __init__(self, graph: fx.Graph, read: Gathered, middle: Middle, buckets: list[Bucket], ranks: int) -> None:
        self.graph, self.read, self.middle = graph, read, middle
        (first, *_) = buckets
        self.shares = Shares(graph, first.params[0].shape[first.dim], ranks)
        self.tiles = {b.params[0].name: tile_params(b.params[0], b.tiles, ranks, b.dim) for b in buckets}
        self.count = first.tiles
        self.weights = {node: Marker(node, *node.args[2:]) for node in middle.weights}  # type: ignore[arg-type]

    def write(self) -> int:
        """Replace the middle by its loops; returns the number of tiles."""
        loops = self.middle.loops()
        for exits in loops:
            self._write(exits)
        return len(loops) * self.count

    def _write(self, exits: list[fx.Node]) -> None:
        needed = self.middle.needed(exits)
        order = self._order(needed)
        into: dict[fx.Node, fx.Node | None] = dict.fromkeys(exits)
        with self.graph.inserting_before(self._place(exits, needed)):
            cut = {key: dim for key, dim in self.middle.given.items() if key[0] in needed}
            sources = dict.fromkeys((source, dim) for (_, source), dim in cut.items())
            wide = {one: self._wide(*one) for one in sources}
            for index in range(self.count):
                _HiddenTile(self, index, order, wide).write(into)
            made = {node: self._whole(node, into[node]) for node in exits}
        for node, whole in made.items():
            self._replace(node, whole)

    def _wide(self, source: fx.Node, dim: int) -> fx.Node:
        # A copy of a bias, so that it is read once and not by each tile.
        return self.shares.wide(source, dim, copies=source in self.read.alone)

    def _whole(self, node: fx.Node, made: fx.Node | None) -> fx.Node:
        """The value of ``node`` from all tiles, in its dtype."""
        assert made is not None  # there is a tile
        dim, dtype = self.middle.dims[node], node.meta["val"].dtype
        if dim is None and node.target is aten.addmm.default:
            made = computed(self.graph, aten.add.Tensor, (made, node.args[0]), node)
        elif dim == 1 or (dim is not None and node not in self.middle.gradients):
            made = self.shares.whole(made, dim)
        if made.meta["val"].dtype != dtype:
            made = computed(self.graph, prims.convert_element_type.default, (made, dtype), node)
        return made

    def _replace(self, node: fx.Node, whole: fx.Node) -> None:
        if self.middle.dims[node] is None or node in self.middle.gradients:
            # What of a later loop reads it finds it there.
            for user in [user for user in node.users if (user, node) in self.middle.given]:
                self.middle.given[user, whole] = self.middle.given.pop((user, node))
            node.replace_all_uses_with(whole)
        else:
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.middle.dims)

    def _place(self, exits: list[fx.Node], needed: set[fx.Node]) -> fx.Node:
        """The node before which the loop runs: what it reads moves before it, where that stands behind."""
        inside = self.middle.dims
        first = min(user for node in exits for user in node.users if inside[node] is None or user not in inside)
        move_needed_before(first, needed)
        return first

    def _order(self, needed: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that a tile computes, in an order that reads a weight at as few times as it can."""
        left = {node: {n for n in node.all_input_nodes if n in needed} for node in sorted(needed)}
        reads = {node: self._weight(node) for node in left}
        held, found = None, list[fx.Node]()
        while left:
            ready = [node for node, waits in left.items() if not waits]
            uses = [reads[node] for node in left]
            node = min(ready, key=lambda n: (reads[n] is not None, reads[n] is not held, uses.count(reads[n])))
            held = reads[node] or held
            found.append(node)
            del left[node]
            for waits in left.values():
                waits.discard(node)
        return found

    def _weight(self, node: fx.Node) -> fx.Node | None:
        """The weight that a product reads; views of it stand with what reads them."""
        if is_view(node):
            return None
        return next((w for n in node.all_input_nodes if (w := self._seen_through(n)) is not None), None)

    def _seen_through(self, node: fx.Node) -> fx.Node | None:
        while is_view(node):
            node = node.args[0]  # type: ignore[assignment]
        return node if node in self.weights else None


class _HiddenTile:
    """One tile of a loop."""

    def __init__(
        self, loops: _Loops, index: int, order: list[fx.Node], wide: dict[tuple[fx.Node, int], fx.Node]
    ) -> None:
        self.loops, self.index, self.order = loops, index, order
        self.graph, self.middle, self.shares = loops.graph, loops.middle, loops.shares
        some: ParamTile = next(iter(loops.tiles.values()))[index]
        self.begin, self.end = some.begin, some.end
        self.copies: dict[fx.Node, fx.Node] = {}
        # All of them at once, as each ends a segment.
        self.parts = {one: self.shares.part(node, one[1], self.begin, self.end) for one, node in wide.items()}

    def write(self, into: dict[fx.Node, fx.Node | None]) -> None:
        """Insert what the tile computes; ``into`` are the exits, of all tiles so far."""
        for node in self.order:
            dim, args = self.middle.dims[node], self._args(node)
            if node in self.middle.gradients:
                into[node] = self._reduce(node, args[0], into[node])
                continue
            if dim is None:
                terms = args[-2:] if node.target in PRODUCTS else [self._insert(node, args)]
                into[node] = added(self.graph, terms, into[node], node)
                continue
            self.copies[node] = self._insert(node, self._sized(node, args, dim))
            if node in into:
                tile = self.shares.padded(self.copies[node], dim, self.begin, self.end)
                into[node] = self.shares.place(tile, into[node], dim, self.begin, self.end)

    def _args(self, node: fx.Node) -> list[Any]:
        def argument(source: fx.Node) -> fx.Node:
            if source in self.loops.weights:
                return self._gathered(source)
            if source in self.copies:
                return self.copies[source]
            dim = self.middle.given.get((node, source))
            return source if dim is None else self.parts[source, dim]

        return list(fx.node.map_arg(node.args, argument))  # type: ignore[arg-type]

    def _sized(self, node: fx.Node, args: list[Any], dim: int) -> list[Any]:
        """Where operators are given the sizes of their result, a tile's."""
        if node.target in SIZED:
            at = SIZED[node.target]
            sizes = list(args[at])
            sizes[dim] = sizes[dim] if sizes[dim] == -1 else self.shares.there(self.begin, self.end)
            args[at] = sizes
        return args

    def _gathered(self, source: fx.Node) -> fx.Node:
        """The tile of a weight."""
        if source not in self.copies:
            marker, dim = self.loops.weights[source], self.middle.weights[source]
            param = self.loops.tiles[marker.name][self.index]
            _, _, *spec = source.args
            val = source.meta["val"].new_empty(param.shape)
            tile = call(self.graph, UNSHARD, (marker.source, list(param.shape), *spec), val, source)
            tile.meta["zg"] = TileFact(self.index, param)
            self.copies[source] = self.shares.cut(tile, dim, self.begin, self.end)
        return self.copies[source]

    def _reduce(self, node: fx.Node, grad: fx.Node, into: fx.Node | None) -> fx.Node:
        """Reduce a tile's gradient and put it in its place in the shard's."""
        args: Any = node.args
        _, shape, *spec = args
        dim: int = self.middle.dims[node]  # type: ignore[assignment]
        param = self.loops.tiles[str(spec[1])][self.index]
        own = [self.end - self.begin if dim == 0 else shape[0], *param.shape[1:]]
        val = node.meta["val"].new_empty(own)
        grad = self.shares.padded(grad, dim, self.begin, self.end)
        tile = call(self.graph, REDUCE_GRAD, (grad, own, *spec), val, node)
        tile.meta["zg"] = TileFact(self.index, param)
        if dim == 1:
            return self.shares.place(tile, into, dim, self.begin, self.end)
        whole = node.meta["val"]
        place = ([tile], into, list(shape), 0, min(self.begin, whole.shape[0]))
        return call(self.graph, PLACE, place, whole.new_empty(whole.shape), node)

    def _insert(self, node: fx.Node, args: list[Any]) -> fx.Node:
        return computed(self.graph, node.target, tuple(args), node, node.kwargs)
