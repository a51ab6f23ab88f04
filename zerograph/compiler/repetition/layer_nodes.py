"""Which nodes of a graph make up which layer of a stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from torch import fx

LayerPart = Literal["input", "tangent", "forward", "backward"]


class NotRepeated(Exception):
    """The layers do not repeat as they must; says why."""


class Stack(NamedTuple):
    """A stack of layers, in a graph that has a few of them.

    Attributes:
        path: the stack's name.
        traced: the numbers of the layers that are there.
        layers: of all of them.
        outputs: of each output of a forward with all layers, the one of this graph that it is, and in which copy of the
            repeated layer, the last but one; -1 where it is not repeated.
    """

    path: str
    traced: Sequence[int]
    layers: Sequence[int]
    outputs: Sequence[tuple[int, int]]


class LayerPlace(NamedTuple):
    """Where a node of a layer stands: which layer, in which of its stretches, and how far in that."""

    layer: int
    part: LayerPart
    offset: int


class LayerNodes:
    """The nodes of a stack's layers, which are counted from 0.

    Attributes:
        places: of nodes that belong to a layer.
        at: the node at each place.
    """

    def __init__(self) -> None:
        self.places: dict[fx.Node, LayerPlace] = {}
        self.at: dict[LayerPlace, fx.Node] = {}

    def layer(self, node: fx.Node) -> int | None:
        """The layer that ``node`` belongs to; None outside of layers."""
        place = self.places.get(node)
        return place.layer if place is not None else None

    def add_stretches(
        self, part: LayerPart, nodes: Sequence[fx.Node], layers: Sequence[int | None], order: Sequence[int]
    ) -> None:
        """Give every layer a stretch of ``nodes``: from its first node to the next one's; the last one's, to its last.

        Args:
            layers: of the modules that the nodes compute; None outside of layers.
            order: in which layers follow one another.

        Raises:
            NotRepeated: a layer has no node, or one behind the first of the next layer.
        """
        # Reversed, so that of several nodes the first one stays in the dict.
        firsts = {layer: i for i, layer in reversed(list(enumerate(layers))) if layer is not None}
        lasts = {layer: i for i, layer in enumerate(layers) if layer is not None}
        if sorted(firsts) != sorted(order):
            raise NotRepeated(f"not every layer has a {part}")
        begins = [firsts[layer] for layer in order]
        # What stands behind the last layer's own nodes (the final norm, the head) belongs to no layer.
        ends = [*begins[1:], lasts[order[-1]] + 1]
        for layer, begin, end in zip(order, begins, ends, strict=True):
            # A node of this layer behind the next one's first: no cut separates the two.
            if lasts[layer] >= end or begin >= end:
                raise NotRepeated(f"the layers are mixed in the {part}")
            for i in range(begin, end):
                self._put(nodes[i], LayerPlace(layer, part, i - begin))

    def add_inputs(
        self,
        nodes: Iterable[fx.Node],
        users: Callable[[fx.Node], Iterable[fx.Node]],
        part: Callable[[fx.Node], LayerPart],
    ) -> None:
        """Give a layer the inputs among ``nodes`` whose ``users`` are all its own: its weights, its entry of a cache.

        An input that several layers read (a mask, rotary tables) belongs to none.
        """
        counts: Counter[tuple[int, LayerPart]] = Counter()
        for node in nodes:
            if node.op == "placeholder":
                layers = {self.layer(user) for user in users(node)}
                layer = layers.pop() if len(layers) == 1 else None
                if layer is not None:
                    key = layer, part(node)
                    self._put(node, LayerPlace(*key, counts[key]))
                    counts[key] += 1

    def _put(self, node: fx.Node, place: LayerPlace) -> None:
        self.places[node], self.at[place] = place, node
