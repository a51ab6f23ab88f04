"""Which parameters can be used in tiles of their rows: those that nothing but products and lookups use.

A tile of W's rows makes columns of ``x @ W.T``, and a term of ``x @ W``, a bias added or not. One is the other's
backward: linear layers, whose rows are outputs, make columns forward and terms backward; layers whose rows are inputs
(``Conv1D`` of transformers, ``x @ self.weight``) the other way round. A lookup, ``embedding(W, ids)``, is ``x @ W`` of
an x of zeros with a one for each id, so that a tile makes a term of it too. The gradient is a product or the lookup's
sum of rows, of which a tile has rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerograph.graph.nodes import Marker, is_identity_view, markers
from zerograph.graph.ops import ACCUMULATE, REDUCE_GRAD, UNSHARD

aten = torch.ops.aten


@dataclass(slots=True)
class Products:
    """The uses of one parameter in a graph.

    Attributes:
        columns: products ``x @ W.T``, of which rows make columns.
        terms: products ``x @ W``, of which rows make terms.
        lookups: ``embedding(W, ids)``.
        other: what can be done with the whole parameter only; None where nothing is.
    """

    columns: list[fx.Node] = field(default_factory=list)
    terms: list[fx.Node] = field(default_factory=list)
    lookups: list[fx.Node] = field(default_factory=list)
    other: fx.Node | None = None


def tilable(graph: fx.Graph) -> Iterator[str]:
    """Names of the parameters that ``graph``, a whole step or a part of it, can use in tiles."""
    refused = {m.name for m in markers(graph, REDUCE_GRAD) if other_than_rows(m.source) is not None}
    read = dict[str, bool]()
    for marker in markers(graph, UNSHARD):
        linear = marker.sharded and marker.node.meta["val"].dim() == 2 and products_of(marker).other is None
        read[marker.name] = read.get(marker.name, True) and linear
    return (name for name, linear in read.items() if linear and name not in refused)


def products_of(marker: Marker) -> Products:
    """The uses of the parameter of an ``unshard`` marker in its graph."""
    found = Products()
    for user, weight, transposed in readers_of(marker.node):
        if _is_linear(user, weight):
            (found.columns if transposed else found.terms).append(user)
        elif not transposed and user.target is aten.embedding.default and weight not in user.args[1:]:
            found.lookups.append(user)
        else:
            found.other = user
    return found


def readers_of(matrix: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """The readers of ``matrix``, with the transpose, cast or view that each reads, and whether that is transposed."""
    waiting = [(matrix, False)]
    for node, transposed in waiting:
        for user in node.users:
            if is_transpose(user):
                waiting.append((user, not transposed))
            elif is_identity_view(user) or is_cast(user):
                waiting.append((user, transposed))
            else:
                yield user, node, transposed


def is_transpose(node: fx.Node) -> bool:
    """Whether ``node`` is the transpose of a matrix."""
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def is_transposed(node: fx.Node) -> bool:
    """Whether ``node``, made of a parameter by views and casts, is its transpose."""
    transposed = False
    while node.target is not UNSHARD:
        transposed ^= is_transpose(node)
        node = node.args[0]  # type: ignore[assignment]
    return transposed


def _is_linear(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is aten.addmm.default:
        bias: fx.Node = user.args[0]  # type: ignore[assignment]
        return not user.kwargs and bias.meta["val"].dim() == 1 and _is_last_alone(user, weight)
    return user.target is aten.mm.default and _is_last_alone(user, weight)


def _is_last_alone(user: fx.Node, weight: fx.Node) -> bool:
    return user.args[-1] is weight and weight not in user.args[:-1]


@dataclass(frozen=True, slots=True)
class GradientTerm:
    """A node of what makes a full gradient; ``transposed``: it makes the transpose of a part of that."""

    node: fx.Node
    transposed: bool

    @property
    def sources(self) -> list[GradientTerm]:
        """The parts that a transpose, cast, view or sum is made of; none for any other node."""
        given: Any = self.node.args
        if is_transpose(self.node):
            return [GradientTerm(given[0], not self.transposed)]
        if is_identity_view(self.node) or is_cast(self.node):
            return [GradientTerm(given[0], self.transposed)]
        return [GradientTerm(term, self.transposed) for term in given[:2]] if is_sum(self.node) else []


@dataclass(frozen=True, slots=True)
class GradientProduct:
    """A product of what makes a full gradient, or its transpose if ``transposed``; there behind ``node``."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    transposed: bool


def products_by_tokens(grad: fx.Node) -> list[GradientProduct]:
    """The products that a gradient is the sum of, in order, where tiles of tokens add to it; none elsewhere."""
    leaves = [part for part in parts_of(grad) if not part.sources]
    if all(leaf.node.target is not ACCUMULATE for leaf in leaves):
        return []
    return sorted((product for leaf in leaves for product in _products(leaf)), key=lambda product: product.node)


def _products(leaf: GradientTerm) -> Iterator[GradientProduct]:
    node: Any = leaf.node
    while node is not None:
        (left, right), into = node.args if node.target is ACCUMULATE else (node.args, None)
        yield GradientProduct(node, left, right, leaf.transposed)
        node = into


def parts_of(grad: fx.Node) -> Iterator[GradientTerm]:
    """The parts of a full gradient: each part once, behind those that it is made of."""
    done, waiting = set[GradientTerm](), [GradientTerm(grad, transposed=False)]
    while waiting:
        missing = [source for source in waiting[-1].sources if source not in done]
        waiting += reversed(missing)
        if not missing and (part := waiting.pop()) not in done:
            done.add(part)
            yield part


def other_than_rows(grad: fx.Node) -> fx.Node | None:
    """The first node in what makes a full gradient of which no rows can be computed alone; None where there is none.

    A gradient is a product, that of a lookup, or a sum of such, transposed or not, cast or not; or a sum of products to
    which tiles of tokens add.
    """
    terms = [part for part in parts_of(grad) if not part.sources]
    by_tokens = any(term.node.target is ACCUMULATE for term in terms)
    fits = _is_product_or_sum if by_tokens else _has_rows
    return next((term.node for term in terms if not fits(term)), None)


def _has_rows(term: GradientTerm) -> bool:
    return is_product(term.node) or (is_gradient_of_lookup(term.node) and not term.transposed)


def _is_product_or_sum(term: GradientTerm) -> bool:
    """Whether ``term`` is a product, or a sum to which each tile of tokens adds the product of two matrices."""
    node: Any = term.node
    while node is not None and node.target is ACCUMULATE and len(node.args[0]) == 2:
        _, node = node.args
    return node is None or (node is term.node and is_product(node))


def is_cast(node: fx.Node) -> bool:
    """Whether ``node`` is its argument in another dtype."""
    return node.target is torch.ops.prims.convert_element_type.default


def is_sum(node: fx.Node) -> bool:
    """Whether ``node`` adds up two tensors of one shape."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    shape = node.meta["val"].shape
    return all(a.meta["val"].shape == shape for a in node.args)  # type: ignore[union-attr]


def is_product(node: fx.Node) -> bool:
    """Whether ``node`` is a product of two matrices; Inductor multiplies a column by a row where there is one token."""
    if node.target is aten.mm.default:
        return True
    if node.target is not aten.mul.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    shapes = [a.meta["val"].shape for a in node.args]  # type: ignore[union-attr]
    return all(len(shape) == 2 for shape in shapes) and (shapes[0][1], shapes[1][0]) == (1, 1)


def is_gradient_of_lookup(node: fx.Node) -> bool:
    """Whether ``node`` adds rows up among zeros, each where an index says."""
    if node.target is not aten._unsafe_masked_index_put_accumulate.default:
        return False
    args: Any = node.args
    zeros, _, indices, _ = args
    return len(indices) == 1 and zeros.target is aten.full.default and zeros.args[1] == 0
