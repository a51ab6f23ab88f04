"""Which tokens a loss looks at.

Shifted logits lack the last token of each sequence: a slice keeps a *window* of the tokens. A slice of a product is the
product of a slice, so logits, and whatever stands between them and the slice, need to exist for the window alone. In
the backward the slice's gradient is written among zeros, and what is linear in it is zero outside of the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zerograph.graph.nodes import aten
from zerograph.tiling.cuts import SLICES, Cut, is_slice_of, is_zeros, linear_in, sliced_dim


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a slice keeps.

    Attributes:
        sizes: of the dimensions that count all tokens, such as batch and sequence.
        dim: which of these the slice is along.
        begin, end, step: of the slice.
    """

    sizes: tuple[int, ...]
    dim: int
    begin: int
    end: int
    step: int

    @property
    def kept(self) -> tuple[int, ...]:
        """The sizes behind the slice."""
        sliced = len(range(self.begin, self.end, self.step))
        return (*self.sizes[: self.dim], sliced, *self.sizes[self.dim + 1 :])

    @property
    def count(self) -> int:
        """Tokens that are kept."""
        return math.prod(self.kept)

    @property
    def all(self) -> int:
        """Tokens in front of the slice."""
        return math.prod(self.sizes)


def window_of(node: fx.Node, tokens: Cut) -> Window | None:
    """Those of the ``tokens`` that ``node`` keeps, or writes among others; None where it is no slice of tokens, or of
    all."""
    if not is_slice_of(node, tokens):
        return None
    dim, shape = sliced_dim(node), _full_shape(node)
    at = SLICES[node.target] + 1
    named: Any = (*node.args[at:], *(None, None, 1)[len(node.args[at:]) :])
    found = Window(tokens.sizes(shape), tokens.dims.index(dim), *slice(*named).indices(shape[dim]))
    return found if found.count < found.all else None


def _full_shape(node: fx.Node) -> Sequence[int]:
    """The shape in front of a slice, or of what it is written into."""
    return node.args[0].meta["val"].shape  # type: ignore[union-attr, no-any-return]


def zero_outside(inside: Mapping[fx.Node, Cut | None]) -> set[fx.Node]:
    """The nodes that are zero for the tokens that a slice leaves out, or a sum to which they add nothing.

    Args:
        inside: by node, which dimensions of its result are tokens.
    """
    found = set[fx.Node]()
    for node in sorted(inside):
        tokens, zero = inside[node], [isinstance(arg, fx.Node) and arg in found for arg in node.args]
        if tokens is not None and node.target is aten.slice_scatter.default:
            is_zero = is_zeros(node.args[0]) and (is_slice_of(node, tokens) or zero[1])
        elif (linear := linear_in(node)) == "each":
            is_zero = any(zero)
        elif linear == "factor and term":
            is_zero = any(zero[:2]) and zero[2]
        else:
            is_zero = all(zero) if linear == "both" else linear == "first" and zero[0]
        if is_zero:
            found.add(node)
    return found
