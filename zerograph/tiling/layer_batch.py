"""A repeated layer that runs for some samples of the batch at a time, all of it, recomputed or saved.

The region (:mod:`zerograph.tiling.region`) begins at the layer's widest product. It takes in all of the layer
that hangs together with it: attention and norms work on each sample by itself, and gradients of weights are sums over
samples. What looks at several samples (batch norm, experts that pick tokens by index) leaves the layer whole. Random
numbers are drawn for the whole batch in front, so that they are those of the layer in one piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from zerograph.graph.attention import is_random
from zerograph.graph.layers import layer_of_node
from zerograph.graph.nodes import LayerGradient, aten
from zerograph.graph.ops import INSTRUCTIONS, SPILL_SAVED
from zerograph.tiling.cuts import ALSO_POINTWISE, ROWS, SIZED, VIEWS, Cut, Mixes, is_pointwise, is_slice_of, shape_of
from zerograph.tiling.region import Growth, Region


def batch_region(product: fx.Node, counts: Callable[[fx.Node], bool] = lambda _: True) -> Region:
    """The region of the layer of ``product``, the widest that it makes of rows that are the batch's.

    Args:
        counts: whether a node that reads something is part of what is looked at.

    Raises:
        Mixes: something looks at several samples at once, or the batch cannot be divided.
    """
    samples = _samples_of(product)
    if not isinstance(samples, int):
        raise Mixes(product, _DYNAMIC)
    if samples < 2:
        raise Mixes(product, f"has a batch of {samples}")
    growth = _BatchGrowth(product, Region(count=samples, large=0), counts)
    try:
        growth.grow()
    except Mixes as error:
        error.place = "sample"
        raise
    return growth.region


_DYNAMIC = "has a size that is not known before it runs (dynamic=False fixes it)"


def _samples_of(product: fx.Node) -> object:
    """The first dimension of what the rows of ``product`` were before they became rows. Whether that counts samples
    does not matter for what is computed: the region is one dimension's, which nothing in it mixes."""
    if isinstance(fact := product.meta.get("zg"), LayerGradient):
        return fact.samples
    node: fx.Node = product.args[-2]  # type: ignore[assignment]
    while len(shape_of(node)) == 2:
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        if node.target in VIEWS:
            node = sources[0]
            continue
        alike = [source for source in sources if shape_of(source) == shape_of(node)]
        if not (is_pointwise(node.target) or node.target in ALSO_POINTWISE) or not alike:
            break
        node = alike[0]
    return shape_of(node)[0]


class _BatchGrowth(Growth):
    """Takes in all of a layer that depends on the batch."""

    def grow(self) -> None:
        """Take in what makes and what reads anything inside, in the layer, and what lies between."""
        self.layer = layer_of_node(self.product)
        self.enter(self.product, Cut(ROWS.dims, self.region.count))
        done: set[fx.Node] = set()
        while waiting := [node for node in self.region.nodes if node not in done]:
            for node in waiting:
                done.add(node)
                for user in self._users(node) if self.region.cuts[node] is not None else ():
                    if user.op == "call_function" and (self._is_of_layer(user) or self._adds_up(user)):
                        self.enter_behind(user)
            for node in self.between():
                self.enter_behind(node)
        self.check_exits()

    def _is_of_layer(self, node: fx.Node) -> bool:
        # Parts of another layer, written already, take views of what this one makes.
        return layer_of_node(node) == self.layer and node.target not in INSTRUCTIONS

    def _adds_up(self, node: fx.Node) -> bool:
        """Whether ``node`` adds two gradients of what enters the layer, for which tracing has no word of a module."""
        inside = self.region.cuts
        both = all(isinstance(arg, fx.Node) and inside.get(arg) is not None for arg in node.args)
        return node.target is aten.add.Tensor and layer_of_node(node) is None and both

    def entered(self, node: fx.Node, cut: Cut | None) -> None:
        if cut is not None and is_slice_of(node, cut):
            raise Mixes(node, "takes some {}s")
        super().entered(node, cut)

    def operand(self, node: fx.Node, source: fx.Node, cut: Cut | None) -> Cut | None:
        found = super().operand(node, source, cut)
        # Of a sum over samples, nothing but the region says how many there are.
        return Cut(found.dims, self.region.count) if found is not None else None

    def check_places(self, node: fx.Node, made: fx.Node, cut: Cut | None) -> None:
        """Refuse sizes that are not known, and dimensions that do not have as many places of each sample."""
        if not isinstance(made.meta.get("val"), torch.Tensor):
            return
        sizes = shape_of(made)
        if not all(isinstance(size, int) for size in sizes):
            raise Mixes(node, _DYNAMIC)
        if cut is not None and any(not sizes[dim] or sizes[dim] % self.region.count for dim in cut.dims):
            raise Mixes(node, "mixes {}s with something else")

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        # A mask that other layers read too exists whole for them.
        own = self._is_of_layer(source) and all(_saves(user) or self._is_of_layer(user) for user in self._users(source))
        if not source.all_input_nodes and source.target not in SIZED:
            return False  # numbers that nobody gives: a part of them is others
        return source.op == "call_function" and own and not is_random(source)


def _saves(user: fx.Node) -> bool:
    """Whether ``user`` takes what it reads to the backward, or to the caller."""
    return user.op == "output" or user.target is SPILL_SAVED
