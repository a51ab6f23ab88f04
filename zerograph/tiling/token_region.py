"""The part of a graph that can run for some tokens at a time: the head's product, and all as large as its logits.

A *region* begins at the product that makes logits, of tokens by words. It holds whatever reads or makes a value as
large, and what lies between. Each of its operators treats every token by itself, or sums over tokens. So the region can
run tile by tile, and only what leaves it exists for all tokens: numbers per token, and sums.

Where the loss looks at a slice of the tokens, tiles are of these alone, and the slice is left out: what stands in front
of it is made for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Activation
from zerograph.tiling.cuts import PRODUCTS, Mixes
from zerograph.tiling.region import Counts, Growth, Region


def region_of(product: fx.Node, counts: Counts = lambda _: True) -> Region:
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
    finder = Growth(product, Region(count=shape[0], large=shape[1] // 2), counts)
    finder.grow()
    return finder.region


def in_both_phases(
    product: fx.Node, region: Callable[[fx.Node, Counts], Region], backward: Set[fx.Node],
    again: Counts = lambda _: False,
) -> tuple[Region, Region]:  # fmt: skip
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
