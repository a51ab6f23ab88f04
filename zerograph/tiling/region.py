"""A part of a graph that can run for some of a dimension at a time, and how it grows and is copied.

Each operator inside keeps the dimension or sums over it (:mod:`zerograph.tiling.cuts`). So the region can run part by
part, and only what leaves it exists whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerograph.graph.attention import ATTENTION, is_random
from zerograph.graph.descent import descend, reached
from zerograph.graph.nodes import aten, is_made_of
from zerograph.tiling.cuts import (
    PRODUCTS,
    ROWS,
    SEVERAL,
    SIZED,
    SLICES,
    VIEWS,
    Cut,
    Mixes,
    cut_of_operand,
    cut_of_result,
    is_slice_of,
    shape_of,
    sliced,
)  # fmt: skip
from zerograph.tiling.windows import Window, window_of, zero_outside

Counts = Callable[[fx.Node], bool]
"""Whether a node is part of what is looked at."""


@dataclass(slots=True, kw_only=True)
class Region:
    """The operators that run for a part at a time.

    Attributes:
        cuts: by operator inside, which dimensions of its result are cut; None of a sum over them.
        given: by operator inside and argument from outside, which of that one's dimensions are cut. Every part reads
            other arguments whole.
        count: of all tokens, or samples, that are looked at.
        large: numbers per token of what may not exist for all of them.
        window: the tokens that the loss looks at; None where it looks at all.
    """

    cuts: dict[fx.Node, Cut | None] = field(default_factory=dict)
    given: dict[tuple[fx.Node, fx.Node], Cut] = field(default_factory=dict)
    count: int
    large: int
    window: Window | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """Those inside, in order."""
        return sorted(self.cuts)

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


class Growth:
    """Grows a region from a product, operator by operator.

    Attributes:
        read_whole: operators inside, each with an argument that it reads whole.
    """

    def __init__(self, product: fx.Node, region: Region, counts: Counts) -> None:
        self.product, self.region, self.counts = product, region, counts
        self.read_whole: set[tuple[fx.Node, fx.Node]] = set()

    def enter(self, node: fx.Node, cut: Cut | None, behind: fx.Node | None = None) -> None:
        """``node`` is inside, with this ``cut``, as was found ``behind`` something; so is what it reads and ``makes``.

        Raises:
            Mixes: something does not treat the dimension place by place.
        """
        descend(self._enter, node, cut, behind)

    def _enter(
        self, node: fx.Node, cut: Cut | None, behind: fx.Node | None = None
    ) -> Iterator[tuple[fx.Node, Cut | None]]:
        self.region.cuts[node] = cut
        if node.target in SLICES and any(isinstance(place, fx.Node) for place in node.args[SLICES[node.target] :]):
            raise Mixes(node, "slices at places that are not known before it runs")
        if is_random(node):
            raise Mixes(node, "is random: a part of it would be another one")
        self.entered(node, cut)
        self.check_places(node, node, cut)
        for source in node.all_input_nodes:
            if source is behind or not isinstance(source.meta.get("val"), (torch.Tensor, tuple, list)):
                continue
            wanted, found = self.operand(node, source, cut), self.region.cuts.get(source)
            self.check_places(node, source, wanted)
            if found is not None:
                if found != wanted:
                    raise Mixes(node, "mixes {}s with something else")
            elif source in self.region.cuts:
                raise Mixes(node, "reads a sum over all {}s")
            elif wanted is None:
                self.read_whole.add((node, source))
            elif self.makes(node, source, wanted):
                yield source, wanted
            else:
                self.region.given[node, source] = wanted

    def check_whole(self) -> None:
        """Raises:
        Mixes: what is read whole was found inside afterwards.
        """
        cuts = self.region.cuts
        for node, source in self.read_whole:
            if node in cuts and source in cuts:
                raise Mixes(node, "reads all {}s")

    def operand(self, node: fx.Node, source: fx.Node, cut: Cut | None) -> Cut | None:
        """The cut of an argument, if ``cut`` is that of the result."""
        return cut_of_operand(node, source, cut)

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
        # Without dropout nobody reads the state of a generator that attention gives: that of any part will do.
        if tokens is None or not tokens.dims:
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
        """``node`` has just been taken in: refuse what tiles would add again, and follow the window of the loss."""
        if cut is None and node.target in PRODUCTS and len(node.args) > 2:
            raise Mixes(node, "adds something to a sum over {}s, which each tile would add again")
        window = window_of(node, cut) if cut is not None else None
        if window is not None:
            self._look_through(window, node)
        if node.target in SEVERAL.keys() | ATTENTION and cut is not None:
            self.region.cuts.update((part, cut_of_result(part, node, cut)) for part in self._users(node))

    def check_places(self, node: fx.Node, made: fx.Node, cut: Cut | None) -> None:
        """Refuse ``made``, which ``node`` makes or reads, if it has not one place for each token.

        A batch of one has dimensions of 1, along which operators repeat tokens.
        """
        if cut is None or not isinstance(made.meta["val"], torch.Tensor):
            return
        places, window = math.prod(cut.sizes(shape_of(made))), self.region.window
        counts = (self.region.count,) if window is None else (window.all, window.count)
        if not isinstance(places, int):
            raise Mixes(node, "has a number of {}s that is not known before it runs")
        if places not in counts:
            raise Mixes(node, "repeats {}s")

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        """Whether ``source``, which ``node`` reads, is to be made part by part too: here, what is large."""
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
        inside = self.region.cuts

        def onward(node: fx.Node) -> list[fx.Node]:
            return [user for user in self._users(node) if user not in inside and user < last]

        return set(reached(inside, onward)) - inside.keys()


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


def copy_of_tile(
    region: Region,
    count: int,
    given: Mapping[tuple[fx.Node, Cut], fx.Node],
    insert: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node],
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Insert the nodes of the region for a tile of ``count``; returns what stands for each.

    That is one node. A product that sums has its two factors instead, as whoever adds up parts multiplies. Constants
    from outside that are not cut are made anew: a kernel that has to load them may write a tensor of the whole's size.

    Args:
        given: by argument from outside and its cut, the tile's part of it; every part reads others whole.
        insert: puts a call like a node's, with other arguments, by place and by name, into the graph.
    """
    copies: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in region.nodes:
        cut = region.cuts[node]

        def argument(source: fx.Node, node: fx.Node = node) -> fx.Node:
            part = region.given.get((node, source))
            copy = given[source, part] if part is not None else copies.get(source)
            if copy is None and _is_constant(source):
                args = fx.node.map_arg(source.args, argument)
                copy = copies[source] = insert(source, args, dict(source.kwargs))  # type: ignore[arg-type]
            return source if copy is None else copy

        if cut is not None and is_slice_of(node, cut):
            # A part is of what is behind the slice, in front of it too.
            copies[node] = argument(sliced(node))
            found[node] = (copies[node],)
            continue
        args: list[Any] = list(fx.node.map_arg(node.args, argument))  # type: ignore[arg-type]
        if cut is None and node.target in PRODUCTS:
            found[node] = tuple(args[-2:])
            continue
        if cut is not None and node.target in SIZED:
            at = SIZED[node.target]
            args[at] = cut.of_part(args[at], count * cut.places(node))
        named = fx.node.map_arg(dict(node.kwargs), argument)  # type: ignore[arg-type]
        copies[node] = insert(node, tuple(args), named)  # type: ignore[arg-type]
        found[node] = (copies[node],)
    return found


def _is_constant(node: fx.Node) -> bool:
    """Whether ``node`` is the same numbers in every step, which a kernel makes as it needs them."""
    return is_made_of(lambda n: n.op == "call_function" and (n.target in _CONSTANTS or n.target in VIEWS), node)


_CONSTANTS = frozenset({
    aten.full.default, aten.scalar_tensor.default, aten.arange.start_step, torch.ops.prims.iota.default,
    aten.unsqueeze.default, aten.expand.default,
})  # fmt: skip
