"""What of a graph can run for some tokens at a time: the head's product, and all that is as large as its logits.

A *region* begins at the product that makes logits, of tokens by words. It holds whatever reads or makes a value as
large, and what lies between. Each of its operators treats every token by itself, or sums over tokens. So the region can
run tile by tile, and only what leaves it exists for all tokens: numbers per token, and sums.

In a tile every value has as many dimensions as in the graph. Where several are tokens (batch and sequence), the last of
them counts the tile's, and the others are 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Activation, aten
from zerograph.graph.torch_private import OpOverload

prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Tokens:
    """The dimensions from ``begin`` to before ``end`` of a value are its tokens."""

    begin: int
    end: int

    @property
    def dim(self) -> int:
        """The dimension that counts a tile's tokens."""
        return self.end - 1

    def moved(self, by: int) -> Tokens:
        """The same, ``by`` dimensions farther on."""
        return Tokens(self.begin + by, self.end + by)

    def of_tile(self, shape: Sequence[int], count: int) -> list[int]:
        """``shape``, for ``count`` tokens."""
        return [*shape[: self.begin], *[1] * (self.end - self.begin - 1), count, *shape[self.end :]]


ROWS = Tokens(0, 1)


class NotByToken(Exception):
    """Why logits have to exist whole; ``node`` is what needs them."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{node.target} {why}")
        self.node = node


@dataclass(slots=True)
class Region:
    """What runs for some tokens at a time.

    Attributes:
        count: of all tokens.
        large: numbers of what may not exist for all of them.
        tokens: by operator inside, which dimensions of its result are tokens; None of a sum over them.
        given: by operator inside and argument from outside, which of that one's dimensions are tokens. What is not
            here every tile reads whole.
    """

    count: int
    large: int
    tokens: dict[fx.Node, Tokens | None] = field(default_factory=dict)
    given: dict[tuple[fx.Node, fx.Node], Tokens] = field(default_factory=dict)

    @property
    def nodes(self) -> list[fx.Node]:
        """Those inside, in order."""
        return sorted(self.tokens)

    def is_large(self, node: fx.Node) -> bool:
        """Whether ``node`` may not exist for all tokens; what no tile makes may."""
        val = node.meta.get("val")
        numbers = isinstance(val, torch.Tensor) and all(isinstance(size, int) for size in val.shape)
        return numbers and self.tokens.get(node, ROWS) is not None and math.prod(_shape(node)) >= self.large

    def exits(self) -> list[fx.Node]:
        """What is read outside, in order."""
        return [node for node in self.nodes if any(user not in self.tokens for user in node.users)]


def region_of(product: fx.Node, counts: Callable[[fx.Node], bool] = lambda _: True) -> Region:
    """The region that begins at ``product``, which makes logits.

    Args:
        counts: whether a node that reads something is part of what is looked at.

    Raises:
        NotByToken: something needs logits, or what is as large, of all tokens at once.
    """
    shape = product.meta["val"].shape
    if not all(isinstance(size, int) for size in shape):
        raise NotByToken(product, "has a number of tokens that is not known before it runs")
    # Half of the logits: of what was cast the gradient may be smaller.
    finder = _Finder(product, Region(shape[0], math.prod(shape) // 2), counts)
    finder.grow()
    return finder.region


def head_of(nodes: Iterable[fx.Node], plan: Plan) -> fx.Node | None:
    """The product of ``nodes`` that makes the logits which ``plan`` cuts in tiles."""
    facts = ((node, node.meta.get("zg")) for node in nodes)
    named = (node for node, fact in facts if isinstance(fact, Activation) and fact.name == plan.head)
    return next((node for node in named if node.target in _PRODUCTS), None)


def copy_of_tile(
    region: Region,
    count: int,
    given: Mapping[tuple[fx.Node, Tokens], fx.Node],
    insert: Callable[[fx.Node, tuple[Any, ...]], fx.Node],
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Insert the region's operators for ``count`` tokens; returns what stands for each.

    That is one node. Of a product that sums over tokens it is its two factors, as whoever adds up tiles multiplies.
    Constants from outside are made anew: a kernel that has to load them may write a tensor of logits' size for it.

    Args:
        given: by argument from outside and its tokens, the tile's part of it.
        insert: puts a call like a node's, with other arguments, into the graph.
    """
    copies: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in region.nodes:
        tokens = region.tokens[node]

        def argument(source: fx.Node, node: fx.Node = node) -> fx.Node:
            if source not in copies and _is_constant(source):
                copies[source] = (insert(source, fx.node.map_arg(source.args, argument)),)  # type: ignore[arg-type]
            if source in copies:
                return copies[source][0]
            part = region.given.get((node, source))
            return source if part is None else given[source, part]

        args: list[Any] = list(fx.node.map_arg(node.args, argument))  # type: ignore[arg-type]
        if tokens is None and node.target in _PRODUCTS:
            copies[node] = tuple(args)
            continue
        if tokens is not None and node.target in _SIZED:
            args[_SIZED[node.target]] = tokens.of_tile(_shape(node), count)
        copies[node] = (insert(node, tuple(args)),)
    return copies


class _Finder:
    def __init__(self, product: fx.Node, region: Region, counts: Callable[[fx.Node], bool]) -> None:
        self.product, self.region, self.counts = product, region, counts

    def grow(self) -> None:
        """Take in what reads or makes large values, and what lies between, until there is nothing more."""
        self._enter(self.product, ROWS)
        done: set[fx.Node] = set()
        while len(done) < len(self.region.tokens):
            for node in [n for n in self.region.nodes if n not in done]:
                done.add(node)
                for user in self._users(node) if self._is_large(node) else ():
                    self._enter_behind(user)
            for node in self._between():
                self._enter_behind(node)
        for node in self.region.exits():
            readers = [user for user in self._users(node) if user not in self.region.tokens]
            if readers and self.region.tokens[node] is not None and not node.meta["val"].is_contiguous():
                raise NotByToken(node, "lies in memory in another order than its dimensions")

    def _users(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self.counts(user)]

    def _is_large(self, node: fx.Node) -> bool:
        # A product of logits has the model's width, which words may be fewer than.
        return self.region.is_large(node) and (node.target not in _PRODUCTS or node is self.product)

    def _enter(self, node: fx.Node, tokens: Tokens | None, behind: fx.Node | None = None) -> None:
        """``node`` is inside, with ``tokens``, as was found ``behind`` something; so is what it reads that is large."""
        self.region.tokens[node] = tokens
        for source in node.all_input_nodes:
            if source is behind or not isinstance(source.meta.get("val"), torch.Tensor):
                continue
            found = _operand(node, source, tokens)
            if source in self.region.tokens:
                if self.region.tokens[source] != found:
                    raise NotByToken(node, "mixes tokens with something else")
            elif found is not None:
                makes_large = source.op == "call_function" and self._is_large(source)
                if makes_large and node.target not in _PRODUCTS:
                    self._enter(source, found)
                else:
                    self.region.given[node, source] = found

    def _enter_behind(self, node: fx.Node) -> None:
        """``node``, which reads something inside, is inside."""
        if node in self.region.tokens:
            return
        if node.op == "output":
            raise NotByToken(node, "returns logits, or what is as large")
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise NotByToken(node, "makes several tensors of them")
        source = next(n for n in node.all_input_nodes if n in self.region.tokens)
        tokens = self.region.tokens[source]
        if tokens is None:
            raise NotByToken(node, "reads a sum over all tokens")
        self._enter(node, _result(node, source, tokens), source)
        # What was given to others before it was found inside is none of the given.
        self.region.given = {key: value for key, value in self.region.given.items() if key[1] not in self.region.tokens}

    def _between(self) -> list[fx.Node]:
        """What depends on the region, and the region on it, in order."""
        inside = self.region.tokens
        node, last = min(inside), max(inside)
        behind: dict[fx.Node, None] = {}
        while node is not last:
            if node in inside or (self.counts(node) and not behind.keys().isdisjoint(node.all_input_nodes)):
                behind[node] = None
            node = node.next
        ahead = set(inside)
        for node in reversed(behind):
            if not ahead.isdisjoint(node.users):
                ahead.add(node)
        return [node for node in behind if node in ahead and node not in inside]


def _is_constant(node: fx.Node) -> bool:
    """Whether ``node`` is the same numbers in every step, which a kernel makes as it needs them."""
    made = node.target in _CONSTANTS or node.target in _VIEWS
    return node.op == "call_function" and made and all(map(_is_constant, node.all_input_nodes))


def _shape(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def _result(node: fx.Node, source: fx.Node, tokens: Tokens) -> Tokens | None:
    """The dimensions of what ``node`` makes that are tokens, if those of ``source`` are; None where it sums over them.

    Raises:
        NotByToken: it does not treat tokens one by one, or nobody knows.
    """
    target: Any = node.target
    if target in _PRODUCTS:
        left, right = node.args[-2:]
        if left is not right and tokens == ROWS and source is left:
            return tokens
        if len(node.args) == 2 and left is not right and tokens == (Tokens(1, 2) if source is left else ROWS):
            return None
    elif target in _REDUCTIONS:
        return _reduced(node, tokens)
    elif target in _VIEWS:
        return _viewed(node, _shape(source), tokens, _shape(node))
    elif target is aten.permute.default:
        order: Any = node.args[1]
        return _together(node, [order.index(d) for d in range(tokens.begin, tokens.end)])
    elif target is aten.unsqueeze.default:
        return tokens.moved(int(_dim(node) <= tokens.begin))
    elif _works_by_token(node, tokens.moved(rise := len(_shape(node)) - len(_shape(source)))):
        return tokens.moved(rise)
    raise NotByToken(node, "is not known to treat every token by itself")


def _operand(node: fx.Node, source: fx.Node, tokens: Tokens | None) -> Tokens | None:
    """The dimensions of an argument that are tokens, if ``tokens`` are those of the result; None where it has none.

    Raises:
        NotByToken: it does not treat tokens one by one, or nobody knows.
    """
    target: Any = node.target
    if target in _PRODUCTS:
        left, right = node.args[-2:]
        if tokens is None:
            return Tokens(1, 2) if source is left else ROWS
        if source in (left, right):
            return tokens if source is left else None
        return _aligned(node, source, tokens)
    if tokens is not None:
        if target in _VIEWS:
            return _viewed(node, _shape(node), tokens, _shape(source))
        if target is aten.permute.default:
            order: Any = node.args[1]
            return _together(node, [order[d] for d in range(tokens.begin, tokens.end)])
        if target is aten.unsqueeze.default:
            return tokens.moved(-int(_dim(node) <= tokens.begin))
        if _works_by_token(node, tokens):
            return _aligned(node, source, tokens)
    raise NotByToken(node, "is not known to treat every token by itself")


def _works_by_token(node: fx.Node, tokens: Tokens) -> bool:
    target: Any = node.target
    if target in _ALONG:
        return _dim(node) not in range(tokens.begin, tokens.end)
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return pointwise or target in _ALSO_POINTWISE


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1]
    return dim % len(_shape(node))  # type: ignore[no-any-return]


def _together(node: fx.Node, dims: list[int]) -> Tokens:
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise NotByToken(node, "takes batch and sequence apart")
    return Tokens(dims[0], dims[0] + len(dims))


def _aligned(node: fx.Node, source: fx.Node, tokens: Tokens) -> Tokens | None:
    """The tokens of what is broadcast to the result of ``node``."""
    shape, result = _shape(source), _shape(node)
    own = tokens.moved(len(shape) - len(result))
    sizes, wanted = shape[max(0, own.begin) : max(0, own.end)], result[tokens.begin : tokens.end]
    if sizes == wanted:
        return own
    if all(size == 1 for size in sizes):
        return None
    raise NotByToken(node, "takes batch and sequence apart")


def _reduced(node: fx.Node, tokens: Tokens) -> Tokens | None:
    """The tokens of a reduction's result."""
    rank = len(_shape(node.all_input_nodes[0]))
    named: Any = node.args[1] if len(node.args) > 1 and node.args[1] is not None else []
    dims = {d % rank for d in (named if isinstance(named, (list, tuple)) else [named])} or set(range(rank))
    over = dims & set(range(tokens.begin, tokens.end))
    if not over:
        keeps = len(node.args) > 2 and bool(node.args[2])
        return tokens if keeps else tokens.moved(-sum(d < tokens.begin for d in dims))
    if len(over) < tokens.end - tokens.begin or node.target not in _SUMS:
        raise NotByToken(node, "does more than sum over tokens")
    return None


def _viewed(node: fx.Node, before: Sequence[int], tokens: Tokens, after: Sequence[int]) -> Tokens:
    """The tokens of what has sizes ``before`` where it is seen with sizes ``after``."""
    ahead, count = math.prod(before[: tokens.begin]), math.prod(before[tokens.begin : tokens.end])
    for begin in range(len(after)):
        for end in range(begin + 1, len(after) + 1):
            if math.prod(after[:begin]) == ahead and math.prod(after[begin:end]) == count:
                return Tokens(begin, end)
    raise NotByToken(node, "mixes tokens with something else")


_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
_SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
_REDUCTIONS = _SUMS | {aten.amax.default, aten.argmax.default, aten.any.dim, aten.any.dims, aten.mean.dim}
_SIZED: Mapping[Any, int] = {
    aten.view.default: 1, aten.reshape.default: 1, aten._unsafe_view.default: 1, aten.expand.default: 1,
    aten.full.default: 0,
}  # fmt: skip
"""Where operators are given the sizes of their result."""
_VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
_CONSTANTS = frozenset({
    aten.full.default, aten.scalar_tensor.default, aten.arange.start_step, prims.iota.default,
    aten.unsqueeze.default, aten.expand.default,
})  # fmt: skip
_ALONG = frozenset(
    {aten.gather.default, aten.slice.Tensor, aten.scatter.value, aten.scatter.src, aten.scatter_add.default}
)
"""They work along one dimension, their second argument."""
_ALSO_POINTWISE = frozenset({
    prims.convert_element_type.default, aten.alias.default, aten.clone.default, aten.expand.default, aten.full.default,
})  # fmt: skip
