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
from zerograph.tiling.cuts import COLUMNS, Cut, Mixes
from zerograph.tiling.middle import Gathered, Middle, middle_of
from zerograph.tiling.region import copies_of
from zerograph.tiling.shares import Shares

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
        except Mixes as error:
            log.warning(
                "%s was planned in one loop of %d tiles, and its weights are in tiles one by one, because %s",
                loop, buckets[0].tiles, error,
            )  # fmt: skip
            continue
        if middle.cuts:
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
            given = {key: cut for key, cut in self.middle.given.items() if key[0] in needed}
            sources = dict.fromkeys((source, cut) for (_, source), cut in given.items())
            wide = {one: self._wide(*one) for one in sources}
            for index in range(self.count):
                _HiddenTile(self, index, wide).write(order, into)
            made = {node: self._full(node, into[node]) for node in exits}
        for node, full in made.items():
            self._replace(node, full)

    def _wide(self, source: fx.Node, cut: Cut) -> fx.Node:
        # A copy of a bias, so that it is read once and not by each tile.
        return self.shares.wide(source, cut.dim, copies=source in self.read.alone)

    def _full(self, node: fx.Node, made: fx.Node | None) -> fx.Node:
        """The value of ``node`` from all tiles, in its dtype."""
        assert made is not None  # there is a tile
        cut, dtype = self.middle.cuts[node], node.meta["val"].dtype
        if cut is None and node.target is aten.addmm.default:
            made = computed(self.graph, aten.add.Tensor, (made, node.args[0]), node)
        elif cut is not None and (cut == COLUMNS or node not in self.middle.gradients):
            made = self.shares.full(made, cut.dim)
        if made.meta["val"].dtype != dtype:
            made = computed(self.graph, prims.convert_element_type.default, (made, dtype), node)
        return made

    def _replace(self, node: fx.Node, full: fx.Node) -> None:
        if self.middle.cuts[node] is None or node in self.middle.gradients:
            # What of a later loop reads it finds it there.
            for user in [user for user in node.users if (user, node) in self.middle.given]:
                self.middle.given[user, full] = self.middle.given.pop((user, node))
            node.replace_all_uses_with(full)
        else:
            node.replace_all_uses_with(full, delete_user_cb=lambda user: user not in self.middle.cuts)

    def _place(self, exits: list[fx.Node], needed: set[fx.Node]) -> fx.Node:
        """The node before which the loop runs: what it reads moves before it, where that stands behind."""
        inside = self.middle.cuts
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

    def __init__(self, loops: _Loops, index: int, wide: dict[tuple[fx.Node, Cut], fx.Node]) -> None:
        self.loops, self.index = loops, index
        self.graph, self.middle, self.shares = loops.graph, loops.middle, loops.shares
        some: ParamTile = next(iter(loops.tiles.values()))[index]
        self.begin, self.end = some.begin, some.end
        # All of them at once, as each ends a segment.
        self.parts = {one: self._cut(node, one[1].dim) for one, node in wide.items()}
        self.gathered: dict[fx.Node, fx.Node] = {}

    def write(self, order: list[fx.Node], into: dict[fx.Node, fx.Node | None]) -> None:
        """Insert what the tile computes; ``into`` are the exits, of all tiles so far."""
        count = self.shares.there(self.begin, self.end)
        for node, made in copies_of(self.middle, order, count, self._part, self._insert):
            cut = self.middle.cuts[node]
            if cut is None:
                into[node] = added(self.graph, list(made), into[node], node)
            elif node in self.middle.gradients:
                into[node] = self._placed(node, made[0], cut, into[node])
            elif node in into:
                tile = self.shares.padded(made[0], cut.dim, self.begin, self.end)
                into[node] = self.shares.place(tile, into[node], cut.dim, self.begin, self.end)

    def _cut(self, wide: fx.Node, dim: int) -> fx.Node:
        return self.shares.cut(self.shares.part(wide, dim, self.begin, self.end), dim, self.begin, self.end)

    def _part(self, node: fx.Node, source: fx.Node) -> fx.Node | None:
        if source in self.loops.weights:
            if source not in self.gathered:
                self.gathered[source] = self._gather(source)
            return self.gathered[source]
        cut = self.middle.given.get((node, source))
        return None if cut is None else self.parts[source, cut]

    def _gather(self, source: fx.Node) -> fx.Node:
        """The tile of a weight."""
        marker, cut = self.loops.weights[source], self.middle.weights[source]
        param = self.loops.tiles[marker.name][self.index]
        _, _, *spec = source.args
        val = source.meta["val"].new_empty(param.shape)
        tile = call(self.graph, UNSHARD, (marker.source, list(param.shape), *spec), val, source)
        tile.meta["zg"] = TileFact(self.index, param)
        return self.shares.cut(tile, cut.dim, self.begin, self.end)

    def _insert(self, node: fx.Node, args: tuple[Any, ...], named: dict[str, Any]) -> fx.Node:
        if node in self.middle.gradients:
            return self._reduce(node, *args)
        return computed(self.graph, node.target, args, node, named)

    def _reduce(self, node: fx.Node, grad: fx.Node, shape: list[int], *spec: Any) -> fx.Node:
        """Reduce a tile's gradient."""
        dim: int = self.middle.cuts[node].dim  # type: ignore[union-attr]
        param = self.loops.tiles[str(spec[1])][self.index]
        own = [self.end - self.begin if dim == 0 else shape[0], *param.shape[1:]]
        grad = self.shares.padded(grad, dim, self.begin, self.end)
        tile = call(self.graph, REDUCE_GRAD, (grad, own, *spec), node.meta["val"].new_empty(own), node)
        tile.meta["zg"] = TileFact(self.index, param)
        return tile

    def _placed(self, node: fx.Node, tile: fx.Node, cut: Cut, into: fx.Node | None) -> fx.Node:
        """The shard's gradient with a tile of it in its place."""
        if cut == COLUMNS:
            return self.shares.place(tile, into, cut.dim, self.begin, self.end)
        full = node.meta["val"]
        place = ([tile], into, list(node.args[1]), 0, min(self.begin, full.shape[0]))  # type: ignore[arg-type]
        return call(self.graph, PLACE, place, full.new_empty(full.shape), node)
