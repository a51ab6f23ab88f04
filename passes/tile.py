"""Use the parameter of a bucket in tiles, one after another, where the bucket is in tiles: none is ever whole.

A tile is the same slice of every rank's rows. For ``x @ W.T`` it computes columns, which are placed in the result, seen
as [tokens, ranks, rows of a shard]. For ``x @ W`` it computes a term from the same columns of x, and terms are added
up. For W's gradient it computes rows, which are reduced alone and placed in the shard's gradient:

    for each tile: W_i = zg.unshard(shard, W's rows of the tile); y = zg.place([x @ W_i.T], y, ...)
    for each tile: W_i = zg.unshard(shard, W's rows of the tile); y = zg.accumulate([x_i, W_i], y)

For ``embedding(W, ids)`` a tile computes a term too: the rows that it has, and zeros for all others.

Offsets are arguments of ``zg::`` operators and never lie in segments, so that tiles of one size share one. The markers
of a tile bear a :class:`~zerograph.graph.nodes.TileFact`, by which the passes behind treat it as a bucket. Safe because
columns of a product are products, and sums differ in their order only; rows that the last shards lack are zeros, and
cut off. Runs on forward, backward and inference graph by themselves, so that the partitioner sees what it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from zerograph.core.errors import ConfigError
from zerograph.core.plan import Bucket, ParamTile, Plan, tile_params
from zerograph.graph.nodes import Marker, TileFact, added, call, computed, markers
from zerograph.graph.ops import ACCUMULATE, PLACE, REDUCE_GRAD, UNSHARD
from zerograph.tiling.products import (
    GradientProduct,
    GradientTerm,
    is_cast,
    is_gradient_of_lookup,
    is_sum,
    is_transpose,
    is_transposed,
    other_than_rows,
    parts_of,
    products_by_tokens,
    products_of,
)
from zerograph.tiling.shares import Shares
from zerograph.tiling.table_rows import TableRows, checked

aten, prims = torch.ops.aten, torch.ops.prims


def tile(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of tiles inserted.

    Raises:
        ConfigError: the graph uses a parameter in a way that its tiles cannot be.
    """
    tiled = {bucket.params[0].name: bucket for bucket in plan.buckets if bucket.tiles > 1}
    read = [m for m in markers(gm.graph, UNSHARD) if m.name in tiled]
    reduced = [m for m in markers(gm.graph, REDUCE_GRAD) if m.name in tiled]
    inserted = 0
    for marker in read:
        inserted += _RowTiles(gm.graph, tiled[marker.name], marker).use()
    for marker in reduced:
        inserted += _RowTiles(gm.graph, tiled[marker.name], marker).reduce()
    if read or reduced:
        gm.graph.eliminate_dead_code()
    return inserted


class _RowTiles:
    """The tiles of one parameter, in place of ``marker``."""

    def __init__(self, graph: fx.Graph, bucket: Bucket, marker: Marker) -> None:
        self.graph, self.marker = graph, marker
        self.param = bucket.params[0]
        self.params = tile_params(self.param, bucket.tiles)
        self.shares = Shares(graph, self.param.shape[0], self.param.home.ranks)
        self.like = marker.node

    def use(self) -> int:
        """In place of an ``unshard`` marker: its products; returns the number of tiles made."""
        found = products_of(self.marker)
        if found.other is not None:
            raise self._refused(found.other)
        for product in found.columns:
            self._replace(product, self._columns(product))
        for product in found.terms:
            self._replace(product, self._terms(product))
        for lookup in found.lookups:
            self._replace(lookup, self._looked_up(lookup))
        return len(self.params) * (len(found.columns) + len(found.terms) + len(found.lookups))

    def reduce(self) -> int:
        """In place of a ``reduce_grad`` marker: one for each tile; returns their number."""
        marker, grad = self.marker, self.marker.source
        other = other_than_rows(grad)
        if other is not None:
            raise self._refused(other)
        products = products_by_tokens(grad)
        tiles = self._reduced_by_tokens(products) if products else self._reduced(grad)
        shape: list[int] = marker.node.args[1]  # type: ignore[assignment]
        into, val = None, marker.node.meta["val"].new_empty(shape)
        for param, tile in zip(self.params, tiles, strict=True):
            with self.graph.inserting_before(marker.node):
                into = call(self.graph, PLACE, ([tile], into, shape, 0, min(param.begin, shape[0])), val, self.like)
        self._replace(marker.node, into)
        return len(self.params) * max(1, len(products))

    def _reduced(self, grad: fx.Node) -> Iterator[fx.Node]:
        """The reduced gradient of each tile."""
        with self.graph.inserting_before(self.marker.node):
            parts = list(parts_of(grad))
            terms = {part: self._of_term(part) for part in parts if not part.sources}
        for index in range(len(self.params)):
            with self.graph.inserting_before(self.marker.node):
                yield self._reduce(self._rows(parts, self.params[index], terms), index)

    def _reduced_by_tokens(self, products: list[GradientProduct]) -> list[fx.Node]:
        """The same where tiles of tokens add to the gradient: each tile of each product is reduced, and the shards are
        added up, so that a gradient is never whole."""
        sums: dict[int, fx.Node] = {}
        for number, product in enumerate(products):
            self.like = product.node
            with self.graph.inserting_before(product.node.next):
                rows = self._rows_of_product(product)
                for index, param in enumerate(self.params):
                    part = rows(param)
                    part = self._transpose(part) if product.transposed else part
                    tile = self._reduce(self._cast(part, self.marker.source), index, number)
                    sums[index] = added(self.graph, [tile], sums.get(index), tile)
        self.like = self.marker.node
        with self.graph.inserting_before(self.marker.node):
            return [self._rounded(sums[index]) for index in range(len(self.params))]

    def _reduce(self, part: fx.Node, index: int, term: int = 0) -> fx.Node:
        """Reduce a tile's rows of the gradient, or of one term of it."""
        param, marker = self.params[index], self.marker.node
        rows = [param.end - param.begin, *param.shape[1:]]
        node = call(self.graph, REDUCE_GRAD, (part, rows, *marker.args[2:]), marker.meta["val"].new_empty(rows), marker)
        node.meta["zg"] = TileFact(index, param, term)
        return node

    def _refused(self, other: fx.Node) -> ConfigError:
        return ConfigError(
            f"{self.param.name} is planned in {len(self.params)} tiles, and {other.target} needs it whole",
            "tiles are of parameters that nothing but products and lookups use: plan this one whole",
        )

    def _replace(self, node: fx.Node, by: fx.Node | None) -> None:
        assert by is not None  # there are several tiles
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def _markers(self) -> Iterator[tuple[ParamTile, fx.Node]]:
        """Each tile, gathered."""
        _, _, *spec = self.marker.node.args
        for index, param in enumerate(self.params):
            val = self.marker.node.meta["val"].new_empty(param.shape)
            args = (self.marker.source, list(param.shape), *spec)
            node = call(self.graph, UNSHARD, args, val, self.marker.node)
            node.meta["zg"] = TileFact(index, param)
            yield param, node

    def _columns(self, product: fx.Node) -> fx.Node:
        """``x @ W.T``, with a bias or without."""
        *bias, x, _ = product.args
        self.like, into = product, None
        with self.graph.inserting_before(product):
            # A copy, so that the bias is read once and not by each tile.
            biases = [self._columns_of(one, copies=True) for one in bias]  # type: ignore[arg-type]
            for param, weight in self._markers():
                begins = [part(param) for part in biases]
                columns = self._call(product.target, *begins, x, self._as_read(weight, product))
                into = self._place_columns(columns, into, param)
            assert into is not None
            return self.shares.full(into, 1)

    def _terms(self, product: fx.Node) -> fx.Node:
        """``x @ W``, with a bias or without."""
        *bias, x, _ = product.args
        self.like, into = product, None
        with self.graph.inserting_before(product):
            part = self._columns_of(x)  # type: ignore[arg-type]
            for param, weight in self._markers():
                into = added(self.graph, [part(param), self._as_read(weight, product)], into, product)
            assert into is not None
            for one in bias:
                into = self._call(aten.add.Tensor, into, one)
            return self._rounded(into)

    def _as_read(self, weight: fx.Node, product: fx.Node) -> fx.Node:
        """A tile as ``product`` reads the weight: cast, as autocast does, and transposed."""
        read: fx.Node = product.args[-1]  # type: ignore[assignment]
        weight = self._cast(weight, read)
        return self._transpose(weight) if is_transposed(read) else weight

    def _looked_up(self, lookup: fx.Node) -> fx.Node:
        """``embedding(W, ids)``: a row is in one tile, and the others add zeros."""
        self.like, into = lookup, None
        ids: fx.Node = lookup.args[1]  # type: ignore[assignment]
        with self.graph.inserting_before(lookup):
            table = TableRows(self.graph, checked(self.graph, ids, self.shares.size, lookup), self.shares.share, lookup)
            for param, weight in self._markers():
                inside, rows = table.in_tile(param)
                term = self._call(aten._unsafe_masked_index.default, weight, inside, [rows], 0)
                into = added(self.graph, [term], into, lookup)
            assert into is not None
            return self._rounded(into)

    def _rounded(self, summed: fx.Node) -> fx.Node:
        """A sum of terms in the dtype of what it replaces."""
        return self._cast(summed, self.like)

    def _cast(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """``node`` in the dtype of ``like``."""
        dtype = like.meta["val"].dtype
        same = node.meta["val"].dtype == dtype
        return node if same else self._call(prims.convert_element_type.default, node, dtype)

    def _of_term(self, term: GradientTerm) -> Callable[[ParamTile], fx.Node]:
        """The function that makes a tile of a gradient's product or lookup; nodes that tiles share are made here."""
        if is_gradient_of_lookup(term.node):
            return self._rows_of_lookup(term.node)
        left, right = term.node.args
        return self._rows_of_product(GradientProduct(term.node, left, right, term.transposed))  # type: ignore[arg-type]

    def _rows_of_product(self, product: GradientProduct) -> Callable[[ParamTile], fx.Node]:
        """The rows of ``dY.T @ x`` for each tile, which takes columns of ``dY``."""
        factor = product.right if product.transposed else product.left
        if not product.transposed:
            factor = factor.args[0] if is_transpose(factor) else self._transpose(factor)  # type: ignore[assignment]
        columns = self._columns_of(factor)
        target = aten.mm.default if product.node.target is ACCUMULATE else product.node.target

        def rows(param: ParamTile) -> fx.Node:
            part = columns(param)
            if product.transposed:
                return self._call(target, product.left, part)
            return self._call(target, self._transpose(part), product.right)

        return rows

    def _rows_of_lookup(self, grad: fx.Node) -> Callable[[ParamTile], fx.Node]:
        """The rows of a lookup's gradient for each tile, added up where ids say: it takes those that it has."""
        args: Any = grad.args
        zeros, mask, (ids,), values = args
        table = TableRows(self.graph, ids, self.shares.share, self.like)

        def rows(param: ParamTile) -> fx.Node:
            inside, index = table.in_tile(param)
            both = self._call(aten.bitwise_and.Tensor, mask, inside)
            val = zeros.meta["val"].new_empty(param.shape)
            into = call(self.graph, zeros.target, (list(param.shape), 0), val, self.like)
            into.kwargs = zeros.kwargs
            return self._call(grad.target, into, both, [index], values)

        return rows

    def _rows(
        self, parts: list[GradientTerm], param: ParamTile, terms: Mapping[GradientTerm, Callable[[ParamTile], fx.Node]]
    ) -> fx.Node:
        """A tile of the gradient, or of its transpose, that ``parts`` make, the last of them."""
        made = dict[GradientTerm, fx.Node]()
        for part in parts:
            given = [made[source] for source in part.sources]
            if part in terms:
                made[part] = terms[part](param)
            elif is_transpose(part.node):
                made[part] = self._transpose(*given)
            elif is_cast(part.node):
                made[part] = self._call(part.node.target, *given, part.node.args[1])
            else:
                made[part] = self._call(part.node.target, *given) if is_sum(part.node) else given[0]
        return made[parts[-1]]

    # ---- the parameter's rows as the last dimension of something

    def _columns_of(self, node: fx.Node, *, copies: bool = False) -> Callable[[ParamTile], fx.Node]:
        """The function that makes the columns of one tile, side by side; what tiles share is made here."""
        dim = node.meta["val"].dim() - 1
        wide = self.shares.wide(node, dim, copies=copies)
        return lambda param: self.shares.part(wide, dim, param.begin, param.end)

    def _place_columns(self, columns: fx.Node, into: fx.Node | None, param: ParamTile) -> fx.Node:
        return self.shares.place(columns, into, 1, param.begin, param.end)

    def _transpose(self, node: fx.Node) -> fx.Node:
        return self._call(aten.permute.default, node, [1, 0])

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return computed(self.graph, target, args, self.like, kwargs)
