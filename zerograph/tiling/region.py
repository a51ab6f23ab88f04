"""A part of a graph that can run for some of a dimension at a time, and how it grows and is copied.

Each operator inside keeps the dimension or sums over it (:mod:`zerograph.tiling.cuts`). So the region can run part by
part, and only what leaves it exists whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerograph.graph.attention import is_random
from zerograph.graph.descent import descend
from zerograph.graph.nodes import aten, is_made_of
from zerograph.tiling.cuts import PRODUCTS, SIZED, SLICES, VIEWS, Cut, Mixes, cut_of_operand, is_slice_of, sliced

Counts = Callable[[fx.Node], bool]
"""Whether a node is part of what is looked at."""


@dataclass(slots=True, kw_only=True)
class Region:
    """The operators that run for a part at a time.

    Attributes:
        cuts: by operator inside, which dimensions of its result are cut; None of a sum over them.
        given: by operator inside and argument from outside, which of that one's dimensions are cut. Every part reads
            other arguments whole.
    """

    cuts: dict[fx.Node, Cut | None] = field(default_factory=dict)
    given: dict[tuple[fx.Node, fx.Node], Cut] = field(default_factory=dict)

    @property
    def nodes(self) -> list[fx.Node]:
        """Those inside, in order."""
        return sorted(self.cuts)


class Growth:
    """Grows a region, operator by operator.

    Attributes:
        read_whole: operators inside, each with an argument that it reads whole.
    """

    def __init__(self, region: Region, counts: Counts) -> None:
        self.region, self.counts = region, counts
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
        for source in node.all_input_nodes:
            if source is behind or not isinstance(source.meta.get("val"), (torch.Tensor, tuple, list)):
                continue
            wanted, found = self.operand(node, source, cut), self.region.cuts.get(source)
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

    def entered(self, node: fx.Node, cut: Cut | None) -> None:
        """``node`` has just been taken in."""

    def operand(self, node: fx.Node, source: fx.Node, cut: Cut | None) -> Cut | None:
        """The cut of an argument, if ``cut`` is that of the result."""
        return cut_of_operand(node, source, cut)

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        """Whether ``source``, which ``node`` reads, is to be made part by part too."""
        raise NotImplementedError


def copies_of(
    region: Region,
    nodes: Iterable[fx.Node],
    count: int,
    part: Callable[[fx.Node, fx.Node], fx.Node | None],
    insert: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node],
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Insert ``nodes`` of the region for a part that has ``count``; yields what stands for each, one after another.

    That is one node. A product that sums has its two factors instead, as whoever adds up parts multiplies. Constants
    from outside that are not cut are made anew: a kernel that has to load them may write a tensor of the whole's size.

    Args:
        part: of the argument from outside that an operator reads, what is cut; None where it is read whole.
        insert: puts a call like a node's, with other arguments, by place and by name, into the graph.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        cut = region.cuts[node]

        def argument(source: fx.Node, node: fx.Node = node) -> fx.Node:
            found = part(node, source) or copies.get(source)
            if found is None and _is_constant(source):
                args = fx.node.map_arg(source.args, argument)
                found = copies[source] = insert(source, args, dict(source.kwargs))  # type: ignore[arg-type]
            return source if found is None else found

        if cut is not None and is_slice_of(node, cut):
            # A part is of what is behind the slice, in front of it too.
            copies[node] = argument(sliced(node))
            yield node, (copies[node],)
            continue
        args: list[Any] = list(fx.node.map_arg(node.args, argument))  # type: ignore[arg-type]
        if cut is None and node.target in PRODUCTS:
            yield node, tuple(args[-2:])
            continue
        if cut is not None and node.target in SIZED:
            at = SIZED[node.target]
            args[at] = cut.of_part(args[at], count * cut.places(node))
        named = fx.node.map_arg(dict(node.kwargs), argument)  # type: ignore[arg-type]
        copies[node] = insert(node, tuple(args), named)  # type: ignore[arg-type]
        yield node, (copies[node],)


def _is_constant(node: fx.Node) -> bool:
    """Whether ``node`` is the same numbers in every step, which a kernel makes as it needs them."""
    return is_made_of(lambda n: n.op == "call_function" and (n.target in _CONSTANTS or n.target in VIEWS), node)


_CONSTANTS = frozenset({
    aten.full.default, aten.scalar_tensor.default, aten.arange.start_step, torch.ops.prims.iota.default,
    aten.unsqueeze.default, aten.expand.default,
})  # fmt: skip
