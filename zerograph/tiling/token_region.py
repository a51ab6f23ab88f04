"""The part of a graph that can run for some tokens at a time: the head's product, and all as large as its logits.

A *region* begins at the product that makes logits, of tokens by words. It holds whatever reads or makes a value as
large, and what lies between. Each of its operators treats every token by itself, or sums over tokens. So the region can
run tile by tile, and only what leaves it exists for all tokens: numbers per token, and sums.

Where the loss looks at a slice of the tokens, tiles are of these alone, and the slice is left out: what stands in front
of it is made for no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.attention import ATTENTION
from zerograph.graph.nodes import Activation
from zerograph.tiling.cuts import PRODUCTS, ROWS, SEVERAL, Cut, Mixes, cut_of_result, is_slice_of, shape_of
from zerograph.tiling.region import Counts, Growth, Region, copies_of
from zerograph.tiling.windows import Window, window_of, zero_outside


@dataclass(slots=True, kw_only=True)
class NodeRegion(Region):
    """The operators that run for some tokens at a time.

    Attributes:
        count: of all tokens that the loss looks at.
        large: numbers per token of what may not exist for all of them.
        window: the tokens that the loss looks at; None where it looks at all.
    """

    count: int
    large: int
    window: Window | None = None

    def is_large(self, node: fx.Node) -> bool:
        """Whether ``node`` may not exist for all tokens; what no tile makes may."""
        tokens = self.cuts.get(node)
        return tokens is not None and self.would_be_large(node, tokens)

    def would_be_large(self, node: fx.Node, tokens: Cut) -> bool:
        """Whether ``node``, whose ``tokens`` these are, may not exist for all of them."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or not all(isinstance(size, int) for size in val.shape):
            return False
        return math.prod(val.shape) >= self.large * math.prod(tokens.sizes(val.shape))

    def counts_all(self, node: fx.Node, tokens: Cut) -> bool:
        """Whether ``tokens`` of ``node`` are more than those that the loss looks at."""
        return self.window is not None and math.prod(tokens.sizes(shape_of(node))) == self.window.all

    def exits(self) -> list[fx.Node]:
        """The nodes that are read outside, in order."""
        return [node for node in self.nodes if any(user not in self.cuts for user in node.users)]


def region_of(product: fx.Node, counts: Counts = lambda _: True) -> NodeRegion:
    """The region that begins at ``product``, which makes logits.

    Args:
        counts: whether a node that reads something is part of what is looked at.

    Raises:
        Mixes: something needs logits, or what is as large, of all tokens at once.
    """
    shape = product.meta["val"].shape
    if not all(isinstance(size, int) for size in shape):
        raise Mixes(product, "has a number of tokens that is not known before it runs")
    # Half of the words: of logits whose padding was cut off the gradient is smaller.
    finder = RegionGrowth(product, NodeRegion(count=shape[0], large=shape[1] // 2), counts)
    finder.grow()
    return finder.region


def in_both_phases(
    product: fx.Node, region: Callable[[fx.Node, Counts], NodeRegion], backward: Set[fx.Node],
    again: Counts = lambda _: False,
) -> tuple[NodeRegion, NodeRegion]:  # fmt: skip
    """The ``region`` of ``product`` in the forward of a joint graph, and in its backward, which is looked at as it will
    be: with what it needs of the forward, and what is computed ``again``.

    Raises:
        Mixes: forward or backward need it for all tokens at once.
    """
    forward = region(product, lambda node: node not in backward)
    return forward, region(product, lambda node: node in backward or node in forward.cuts or again(node))


def head_of(nodes: Iterable[fx.Node], plan: Plan) -> fx.Node | None:
    """The product of ``nodes`` that makes the logits which ``plan`` cuts in tiles."""
    facts = ((node, node.meta.get("zg")) for node in nodes)
    named = (node for node, fact in facts if isinstance(fact, Activation) and fact.name == plan.head)
    return next((node for node in named if node.target in PRODUCTS), None)


def copy_of_tile(
    region: NodeRegion,
    count: int,
    given: Mapping[tuple[fx.Node, Cut], fx.Node],
    insert: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node],
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """All of :func:`~zerograph.tiling.region.copies_of` for a tile of ``count`` tokens.

    Args:
        given: by argument from outside and its tokens, the tile's part of it.
    """

    def part(node: fx.Node, source: fx.Node) -> fx.Node | None:
        tokens = region.given.get((node, source))
        return None if tokens is None else given[source, tokens]

    return dict(copies_of(region, region.nodes, count, part, insert))


def memory_order(val: torch.Tensor) -> list[int] | None:
    """The dimensions of ``val`` as they lie in memory; None where that is their order, or memory between them is not
    its own."""
    order = sorted(range(val.dim()), key=val.stride, reverse=True)
    return order if not val.is_contiguous() and val.permute(order).is_contiguous() else None


def can_be_placed(node: fx.Node, tokens: Cut) -> bool:
    """Whether parts of ``node`` have a place in one tensor that lies in memory as that of all ``tokens``."""
    shape, val = shape_of(node), node.meta["val"]
    split = math.prod(shape[tokens.dims[0] : tokens.dim]) != math.prod(tokens.sizes(shape)[:-1])
    return not split and bool(val.is_contiguous() or (len(tokens.dims) == 1 and memory_order(val)))


class RegionGrowth(Growth):
    """Grows a region from a product."""

    region: NodeRegion

    def __init__(self, product: fx.Node, region: NodeRegion, counts: Counts) -> None:
        super().__init__(region, counts)
        self.product = product

    def grow(self) -> None:
        """Take in what reads or makes large values, and what lies between, until there is nothing more."""
        self.enter(self.product, ROWS)
        done: set[fx.Node] = set()
        while len(done) < len(self.region.cuts):
            for node in [n for n in self.region.nodes if n not in done]:
                done.add(node)
                for user in self._users(node) if self._is_large(node) else ():
                    self.enter_behind(user)
            for node in self.between():
                self.enter_behind(node)
        self.check_exits()

    def check_exits(self) -> None:
        """Raises:
        Mixes: what is read outside cannot be put together.
        """
        self.check_whole()
        inside = self.region.cuts
        zero = zero_outside(inside) if self.region.window is not None else frozenset[fx.Node]()
        for node in self.region.exits():
            if any(user not in inside for user in self._users(node)):
                self._check_exit(node, inside[node], zero)

    def _check_exit(self, node: fx.Node, tokens: Cut | None, zero: Set[fx.Node]) -> None:
        """Refuse a node read outside that is not zero for tokens the loss ignores, or cannot be put together."""
        inside = self.region.cuts
        of_tokens = [node] if tokens is not None else [n for n in node.all_input_nodes if n in inside]
        counts_all = any(self.region.counts_all(n, t) for n in of_tokens if (t := inside[n]) is not None)
        if counts_all and node not in zero:
            raise Mixes(node, "reads more tokens than a slice of the logits keeps")
        if tokens is None:
            return
        if not can_be_placed(node, tokens):
            raise Mixes(node, "lies in memory in another order than its dimensions")

    def _users(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self.counts(user)]

    def _is_large(self, node: fx.Node) -> bool:
        # A product of logits has the model's width, which words may be fewer than.
        return self.region.is_large(node) and (node.target not in PRODUCTS or node is self.product)

    def _begins(self, product: fx.Node, tokens: Cut) -> bool:
        """Whether the region begins at ``product``, too, which makes something large of what comes from outside."""
        return False

    def entered(self, node: fx.Node, cut: Cut | None) -> None:
        if cut is None and node.target in PRODUCTS and len(node.args) > 2:
            raise Mixes(node, "adds something to a sum over {}s, which each tile would add again")
        window = window_of(node, cut) if cut is not None else None
        if window is not None:
            self._look_through(window, node)
        if node.target in SEVERAL.keys() | ATTENTION and cut is not None:
            self.region.cuts.update((part, cut_of_result(part, node, cut)) for part in self._users(node))

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        if source.target in SEVERAL:
            return True
        made = source.op == "call_function" and (source.target not in PRODUCTS or self._begins(source, cut))
        # What is sliced for the loss to read, such as a label's probabilities, is there anyway.
        large = made and self.region.would_be_large(source, cut) and not is_slice_of(source, cut)
        return large and node.target not in PRODUCTS

    def _look_through(self, window: Window, node: fx.Node) -> None:
        """``node`` keeps a slice of the tokens, or writes it among zeros."""
        region = self.region
        if region.window is None and window.all == region.count:
            region.window, region.count = window, window.count
        if region.window != window:
            raise Mixes(node, "keeps other tokens than another slice")

    def enter_behind(self, node: fx.Node) -> None:
        """``node``, which reads something inside, is inside."""
        if node in self.region.cuts:
            return
        if node.op == "output":
            raise Mixes(node, "returns logits, or what is as large")
        if not isinstance(node.meta.get("val"), torch.Tensor) and node.target not in SEVERAL.keys() | ATTENTION:
            raise Mixes(node, "makes several tensors of them")
        source = next(n for n in node.all_input_nodes if n in self.region.cuts)
        tokens = self.region.cuts[source]
        if tokens is None:
            raise Mixes(node, "reads a sum over all {}s")
        self.enter(node, cut_of_result(node, source, tokens), source)
        self.forget_given()

    def forget_given(self) -> None:
        """Remove the arguments that were given to others before they were found inside."""
        self.region.given = {key: value for key, value in self.region.given.items() if key[1] not in self.region.cuts}

    def between(self) -> list[fx.Node]:
        """The nodes that depend on the region, and the region on them, in order."""
        behind = sorted(self.behind(max(self.region.cuts)))
        ahead = set(self.region.cuts)
        for node in reversed(behind):
            if not ahead.isdisjoint(node.users):
                ahead.add(node)
        return [node for node in behind if node in ahead]

    def behind(self, last: fx.Node) -> set[fx.Node]:
        """The nodes that depend on the region, and stand in front of ``last``."""
        inside, found = self.region.cuts, set[fx.Node]()
        waiting = [user for node in inside for user in node.users]
        while waiting:
            node = waiting.pop()
            if node not in found and node not in inside and node < last and self.counts(node):
                found.add(node)
                waiting += node.users
        return found
