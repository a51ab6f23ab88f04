"""The part of a repeated layer that can run for some tokens at a time: its MLP, and the norm and residual around it.

The region (:mod:`zerograph.tiling.region`) begins at the layer's widest product, and holds all that is wider per
token than what enters and leaves an MLP: that must not exist for all tokens. Operators next to it that treat every
token by itself are taken in as well, so that they run tile by tile: the norm in front, the residual behind, and what
their gradients are made of. Attention mixes tokens, and ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set

from torch import fx

from zerograph.core.step import layer_of_activation
from zerograph.graph.layers import layer_of_node
from zerograph.graph.nodes import Activation, LayerGradient
from zerograph.tiling.cuts import PRODUCTS, ROWS, Cut, Mixes
from zerograph.tiling.region import Growth, Region


def layer_region(product: fx.Node, counts: Callable[[fx.Node], bool] = lambda _: True) -> Region:
    """The region of a layer that begins at ``product``, which bears the lasting name of what it makes.

    Args:
        counts: whether a node that reads something is part of what is looked at.

    Raises:
        Mixes: something needs the middle of the MLP of all tokens at once, or ``product`` begins none.
    """
    (tokens, wide), entering = product.meta["val"].shape, _width_of_source(product)
    if not isinstance(tokens, int):
        raise Mixes(product, "has a number of tokens that is not known before it runs")
    if not tokens:
        raise Mixes(product, "has no tokens")
    if wide <= entering:
        raise Mixes(product, "makes nothing wider than what it reads")
    # Half, as a gate may be cut off; but no less than the stream of the model, which leaves the MLP.
    finder = _LayerFinder(product, Region(count=tokens, large=max(wide // 2, entering + 1)), counts)
    finder.grow()
    finder.absorb(layer_of_activation(product.meta["zg"].name))
    return finder.region


def wide_products(nodes: Iterable[fx.Node], names: Collection[str]) -> Iterator[fx.Node]:
    """For each name, the first product of ``nodes`` that makes it, and the gradients that bear it."""
    wanted, found = frozenset(names), set[str]()
    for node in nodes:
        fact = node.meta.get("zg")
        if node.target in PRODUCTS and isinstance(fact, Activation) and fact.name in wanted:
            if isinstance(fact, LayerGradient):
                yield node
            elif fact.name not in found:
                found.add(fact.name)
                yield node


def _width_of_source(product: fx.Node) -> int:
    left: fx.Node = product.args[-2]  # type: ignore[assignment]
    return left.meta["val"].shape[1]  # type: ignore[no-any-return]


class _LayerFinder(Growth):
    """Also begins at products beside the first: those of a gate, or of the gradient of what the MLP makes."""

    def _begins(self, product: fx.Node, tokens: Cut) -> bool:
        return tokens == ROWS

    def _is_large(self, node: fx.Node) -> bool:
        first = node.target not in PRODUCTS or self.region.cuts.keys().isdisjoint(node.all_input_nodes)
        return first and self.region.is_large(node)

    def absorb(self, layer: str) -> None:
        """Take in what stands next to the region in ``layer``, treats every token by itself and is no product."""
        refused: set[fx.Node] = set()
        self._behind, self._until = set[fx.Node](), self.product
        while True:
            near = next((n for n in self._near() if n not in refused and layer_of_node(n) in (layer, None)), None)
            if near is None:
                return
            # What could not be taken in before can be where something else was.
            if self._takes_in(near):
                refused.clear()
            else:
                refused.add(near)

    def _near(self) -> Iterator[fx.Node]:
        """The nodes that read a result of the region, and those that make inputs for it alone."""
        inside = self.region.cuts
        for node in self.region.nodes:
            if inside[node] is not None:
                yield from (user for user in self._users(node) if self._may_be_inside(user))
        for source in dict.fromkeys(source for _, source in self.region.given):
            if self._may_be_inside(source) and all(user in inside for user in self._users(source)):
                yield source

    def _may_be_inside(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target not in PRODUCTS and node not in self.region.cuts

    def _takes_in(self, node: fx.Node) -> bool:
        region = self.region
        before = dict(region.cuts), dict(region.given), region.window, region.count, set(self.read_whole)
        try:
            given = {tokens for (_, source), tokens in region.given.items() if source is node}
            if not given:
                self.enter_behind(node)
            elif len(given) == 1:
                self.enter(node, given.pop())
                self.forget_given()
            else:
                raise Mixes(node, "is read in two ways")
            self._check_order(region.cuts.keys() - before[0].keys())
            self.check_exits()
        except Mixes:
            region.cuts, region.given, region.window, region.count, self.read_whole = before
        return node in region.cuts

    def _check_order(self, new: Set[fx.Node]) -> None:
        """Refuse ``new`` nodes that read from outside what depends on the region.

        A node behind the region stays behind it, whatever is taken in: that is a user, which was, or a source that
        nobody else reads.
        """
        inside = self.region.cuts
        for node in new:
            if node > self._until:
                self._behind, self._until = self.behind(node), node
            if any(source in self._behind and source not in inside for source in node.all_input_nodes):
                raise Mixes(node, "is parted from the rest by what mixes tokens")
