"""The part of a graph that can run for some tokens at a time: the head's product, and all as large as its logits.

A *region* begins at the product that makes logits, of tokens by words. It holds whatever reads or makes a value as
large, and what lies between. Each of its operators treats every token by itself, or sums over tokens. So the region can
run tile by tile, and only what leaves it exists for all tokens: numbers per token, and sums.

In a tile every value has as many dimensions as in the graph. Where several are tokens (batch and sequence), the last of
them counts the tile's, and the others are 1. Where the loss looks at a slice of the tokens, tiles are of these alone,
and the slice is left out: what stands in front of it is made for no others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.descent import descend
from zerograph.graph.nodes import Activation, aten, is_made_of
from zerograph.graph.torch_private import OpOverload
from zerograph.tiling.tokens import (
    COLUMNS,
    ROWS,
    SLICES,
    Tokens,
    Window,
    is_zeros,
    slices_tokens,
    window_of,
    zero_outside,
)

prims = torch.ops.prims


class NotByToken(Exception):
    """Why logits have to exist whole; ``node`` is what needs them."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{node.target} {why}")
        self.node = node


@dataclass(slots=True)
class NodeRegion:
    """The operators that run for some tokens at a time.

    Attributes:
        count: of all tokens that the loss looks at.
        large: numbers per token of what may not exist for all of them.
        tokens: by operator inside, which dimensions of its result are tokens; None of a sum over them.
        given: by operator inside and argument from outside, which of that one's dimensions are tokens. Every tile reads
            other arguments whole.
        window: the tokens that the loss looks at; None where it looks at all.
    """

    count: int
    large: int
    tokens: dict[fx.Node, Tokens | None] = field(default_factory=dict)
    given: dict[tuple[fx.Node, fx.Node], Tokens] = field(default_factory=dict)
    window: Window | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """Those inside, in order."""
        return sorted(self.tokens)

    def is_large(self, node: fx.Node) -> bool:
        """Whether ``node`` may not exist for all tokens; what no tile makes may."""
        tokens = self.tokens.get(node)
        return tokens is not None and self.would_be_large(node, tokens)

    def would_be_large(self, node: fx.Node, tokens: Tokens) -> bool:
        """Whether ``node``, whose ``tokens`` these are, may not exist for all of them."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or not all(isinstance(size, int) for size in val.shape):
            return False
        return math.prod(val.shape) >= self.large * math.prod(tokens.sizes(val.shape))

    def counts_all(self, node: fx.Node, tokens: Tokens) -> bool:
        """Whether ``tokens`` of ``node`` are more than those that the loss looks at."""
        return self.window is not None and math.prod(tokens.sizes(_shape(node))) == self.window.all

    def exits(self) -> list[fx.Node]:
        """The nodes that are read outside, in order."""
        return [node for node in self.nodes if any(user not in self.tokens for user in node.users)]


def region_of(product: fx.Node, counts: Callable[[fx.Node], bool] = lambda _: True) -> NodeRegion:
    """The region that begins at ``product``, which makes logits.

    Args:
        counts: whether a node that reads something is part of what is looked at.

    Raises:
        NotByToken: something needs logits, or what is as large, of all tokens at once.
    """
    shape = product.meta["val"].shape
    if not all(isinstance(size, int) for size in shape):
        raise NotByToken(product, "has a number of tokens that is not known before it runs")
    # Half of the words: of logits whose padding was cut off the gradient is smaller.
    finder = RegionGrowth(product, NodeRegion(shape[0], shape[1] // 2), counts)
    finder.grow()
    return finder.region


def head_of(nodes: Iterable[fx.Node], plan: Plan) -> fx.Node | None:
    """The product of ``nodes`` that makes the logits which ``plan`` cuts in tiles."""
    facts = ((node, node.meta.get("zg")) for node in nodes)
    named = (node for node, fact in facts if isinstance(fact, Activation) and fact.name == plan.head)
    return next((node for node in named if node.target in PRODUCTS), None)


def copy_of_tile(
    region: NodeRegion,
    count: int,
    given: Mapping[tuple[fx.Node, Tokens], fx.Node],
    insert: Callable[[fx.Node, tuple[Any, ...]], fx.Node],
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Insert the region's operators for ``count`` tokens; returns what stands for each.

    That is one node. A product that sums over tokens has its two factors instead, as whoever adds up tiles multiplies.
    Constants from outside that count no tokens are made anew: a kernel that has to load them may write a tensor of
    logits' size for it.

    Args:
        given: by argument from outside and its tokens, the tile's part of it.
        insert: puts a call like a node's, with other arguments, into the graph.
    """
    copies: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in region.nodes:
        tokens = region.tokens[node]

        def argument(source: fx.Node, node: fx.Node = node) -> fx.Node:
            part = region.given.get((node, source))
            if part is not None:
                return given[source, part]
            if source not in copies and _is_constant(source):
                copies[source] = (insert(source, fx.node.map_arg(source.args, argument)),)  # type: ignore[arg-type]
            return copies[source][0] if source in copies else source

        if tokens is not None and slices_tokens(node, tokens):
            # A tile is of tokens behind the slice, in front of it too.
            copies[node] = (argument(_sliced(node)),)
            continue
        args: list[Any] = list(fx.node.map_arg(node.args, argument))  # type: ignore[arg-type]
        if tokens is None and node.target in PRODUCTS:
            copies[node] = tuple(args)
            continue
        if tokens is not None and node.target in _SIZED:
            args[_SIZED[node.target]] = tokens.of_tile(_shape(node), count)
        copies[node] = (insert(node, tuple(args)),)
    return copies


class RegionGrowth:
    """Grows a region from a product."""

    def __init__(self, product: fx.Node, region: NodeRegion, counts: Callable[[fx.Node], bool]) -> None:
        self.product, self.region, self.counts = product, region, counts

    def grow(self) -> None:
        """Take in what reads or makes large values, and what lies between, until there is nothing more."""
        self.enter(self.product, ROWS)
        done: set[fx.Node] = set()
        while len(done) < len(self.region.tokens):
            for node in [n for n in self.region.nodes if n not in done]:
                done.add(node)
                for user in self._users(node) if self._is_large(node) else ():
                    self.enter_behind(user)
            for node in self.between():
                self.enter_behind(node)
        self.check_exits()

    def check_exits(self) -> None:
        """Raises:
        NotByToken: what is read outside cannot be put together.
        """
        inside = self.region.tokens
        zero = zero_outside(inside) if self.region.window is not None else frozenset[fx.Node]()
        for node in self.region.exits():
            if any(user not in inside for user in self._users(node)):
                self._check_exit(node, inside[node], zero)

    def _check_exit(self, node: fx.Node, tokens: Tokens | None, zero: Set[fx.Node]) -> None:
        """Refuse a node read outside that is not zero for tokens the loss ignores, or cannot be put together."""
        inside = self.region.tokens
        of_tokens = [node] if tokens is not None else [n for n in node.all_input_nodes if n in inside]
        counts_all = any(self.region.counts_all(n, t) for n in of_tokens if (t := inside[n]) is not None)
        if counts_all and node not in zero:
            raise NotByToken(node, "reads more tokens than a slice of the logits keeps")
        if tokens is None:
            return
        shape = _shape(node)
        apart = math.prod(shape[tokens.dims[0] : tokens.dim]) != math.prod(tokens.sizes(shape)[:-1])
        if apart or not node.meta["val"].is_contiguous():
            raise NotByToken(node, "lies in memory in another order than its dimensions")

    def _users(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self.counts(user)]

    def _is_large(self, node: fx.Node) -> bool:
        # A product of logits has the model's width, which words may be fewer than.
        return self.region.is_large(node) and (node.target not in PRODUCTS or node is self.product)

    def _begins(self, product: fx.Node, tokens: Tokens) -> bool:
        """Whether the region begins at ``product``, too, which makes something large of what comes from outside."""
        return False

    def enter(self, node: fx.Node, tokens: Tokens | None, behind: fx.Node | None = None) -> None:
        """``node`` is inside, with ``tokens``, as was found ``behind`` something; so is what it reads that is large."""
        descend(self._enter, node, tokens, behind)

    def _enter(
        self, node: fx.Node, tokens: Tokens | None, behind: fx.Node | None = None
    ) -> Iterator[tuple[fx.Node, Tokens | None]]:
        self.region.tokens[node] = tokens
        if node.target in SLICES and any(isinstance(place, fx.Node) for place in node.args[SLICES[node.target] :]):
            raise NotByToken(node, "slices at places that are not known before it runs")
        window = window_of(node, tokens) if tokens is not None else None
        if window is not None:
            self._look_through(window, node)
        if node.target in _SEVERAL:
            for part in self._users(node):
                self.region.tokens[part] = tokens
        for source in node.all_input_nodes:
            if source is behind or not isinstance(source.meta.get("val"), (torch.Tensor, tuple, list)):
                continue
            if node.target is operator.getitem and source.target in _SEVERAL:
                if source not in self.region.tokens:
                    yield source, tokens
                continue
            found = _operand(node, source, tokens)
            if source in self.region.tokens:
                if self.region.tokens[source] != found:
                    raise NotByToken(node, "mixes tokens with something else")
            elif found is not None:
                made = source.op == "call_function" and (source.target not in PRODUCTS or self._begins(source, found))
                makes_large = made and self.region.would_be_large(source, found)
                # What is sliced for the loss to read, such as a label's probabilities, is there anyway.
                sliced = makes_large and slices_tokens(source, found)
                if makes_large and not sliced and node.target not in PRODUCTS:
                    yield source, found
                else:
                    self.region.given[node, source] = found

    def _look_through(self, window: Window, node: fx.Node) -> None:
        """``node`` keeps a slice of the tokens, or writes it among zeros."""
        region = self.region
        if region.window is None and window.all == region.count:
            region.window, region.count = window, window.count
        if region.window != window:
            raise NotByToken(node, "keeps other tokens than another slice")

    def enter_behind(self, node: fx.Node) -> None:
        """``node``, which reads something inside, is inside."""
        if node in self.region.tokens:
            return
        if node.op == "output":
            raise NotByToken(node, "returns logits, or what is as large")
        if not isinstance(node.meta.get("val"), torch.Tensor) and node.target not in _SEVERAL:
            raise NotByToken(node, "makes several tensors of them")
        source = next(n for n in node.all_input_nodes if n in self.region.tokens)
        tokens = self.region.tokens[source]
        if tokens is None:
            raise NotByToken(node, "reads a sum over all tokens")
        self.enter(node, _result(node, source, tokens), source)
        self.forget_given()

    def forget_given(self) -> None:
        """Remove the arguments that were given to others before they were found inside."""
        self.region.given = {key: value for key, value in self.region.given.items() if key[1] not in self.region.tokens}

    def between(self) -> list[fx.Node]:
        """The nodes that depend on the region, and the region on them, in order."""
        behind = sorted(self.behind(max(self.region.tokens)))
        ahead = set(self.region.tokens)
        for node in reversed(behind):
            if not ahead.isdisjoint(node.users):
                ahead.add(node)
        return [node for node in behind if node in ahead]

    def behind(self, last: fx.Node) -> set[fx.Node]:
        """The nodes that depend on the region, and stand in front of ``last``."""
        inside, found = self.region.tokens, set[fx.Node]()
        waiting = [user for node in inside for user in node.users]
        while waiting:
            node = waiting.pop()
            if node not in found and node not in inside and node < last and self.counts(node):
                found.add(node)
                waiting += node.users
        return found


def _is_constant(node: fx.Node) -> bool:
    """Whether ``node`` is the same numbers in every step, which a kernel makes as it needs them."""
    return is_made_of(lambda n: n.op == "call_function" and (n.target in _CONSTANTS or n.target in _VIEWS), node)


def _shape(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def _result(node: fx.Node, source: fx.Node, tokens: Tokens) -> Tokens | None:
    """The dimensions of what ``node`` makes that are tokens, if those of ``source`` are; None where it sums over them.

    Raises:
        NotByToken: it does not treat tokens one by one, or nobody knows.
    """
    target: Any = node.target
    if target in _SEVERAL:
        return _several(node, tokens)
    if target in PRODUCTS:
        left, right = node.args[-2:]
        if left is not right and tokens == ROWS and source is left:
            return tokens
        if len(node.args) == 2 and left is not right and tokens == (COLUMNS if source is left else ROWS):
            return None
    elif target in _REDUCTIONS:
        return _reduced(node, tokens)
    elif target in _VIEWS:
        return _viewed(node, _shape(source), tokens, _shape(node))
    elif target is aten.permute.default:
        order: Any = node.args[1]
        return _in_order(node, [order.index(d) for d in tokens.dims])
    elif target is aten.unsqueeze.default:
        return Tokens(tuple(d + int(_dim(node) <= d) for d in tokens.dims))
    elif _works_by_token(node, tokens.moved(rise := len(_shape(node)) - len(_shape(source)))):
        return tokens.moved(rise)
    raise NotByToken(node, "is not known to treat every token by itself")


def _operand(node: fx.Node, source: fx.Node, tokens: Tokens | None) -> Tokens | None:
    """The dimensions of an argument that are tokens, if ``tokens`` are those of the result; None where it has none.

    Raises:
        NotByToken: it does not treat tokens one by one, or nobody knows.
    """
    target: Any = node.target
    if target in PRODUCTS:
        left, right = node.args[-2:]
        if tokens is None:
            return COLUMNS if source is left else ROWS
        if source in (left, right):
            return tokens if source is left else None
        return _aligned(node, source, tokens)
    if tokens is not None:
        if target in _SEVERAL:
            return _several(node, tokens)
        if target in _VIEWS:
            return _viewed(node, _shape(node), tokens, _shape(source))
        if target is aten.permute.default:
            order: Any = node.args[1]
            return _in_order(node, [order[d] for d in tokens.dims])
        if target is aten.unsqueeze.default:
            return Tokens(tuple(d - int(_dim(node) < d) for d in tokens.dims if d != _dim(node)))
        if slices_tokens(node, tokens):
            if source is _sliced(node):
                return tokens
            if is_zeros(source):
                return None
            raise NotByToken(node, "writes some tokens among others")
        if _works_by_token(node, tokens):
            return _aligned(node, source, tokens)
    raise NotByToken(node, "is not known to treat every token by itself")


def _several(node: fx.Node, tokens: Tokens) -> Tokens:
    """The tokens of each of several tensors that ``node`` makes of one."""
    at, keeps = _SEVERAL[node.target]
    named: Any = node.args[at] if len(node.args) > at else 0
    rank = len(_shape(node.all_input_nodes[0]))
    dims = {dim % rank for dim in (named if isinstance(named, (list, tuple)) else [named])}
    if not dims.isdisjoint(tokens.dims) or (keeps and not node.kwargs.get(keeps)):
        raise NotByToken(node, "makes several tensors of them")
    return tokens


def _works_by_token(node: fx.Node, tokens: Tokens) -> bool:
    target: Any = node.target
    if target in SLICES:
        return True  # along other dimensions, or a window
    if target in _ALONG:
        return _dim(node) not in tokens.dims
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return pointwise or target in _ALSO_POINTWISE


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return dim % len(_shape(node))  # type: ignore[no-any-return]


def _sliced(node: fx.Node) -> fx.Node:
    """The tensor that a slice is of, or that it writes."""
    return node.args[1 if node.target is aten.slice_scatter.default else 0]  # type: ignore[return-value]


def _in_order(node: fx.Node, dims: list[int]) -> Tokens:
    if dims != sorted(dims):
        raise NotByToken(node, "puts sequence before batch")
    return Tokens(tuple(dims))


def _aligned(node: fx.Node, source: fx.Node, tokens: Tokens) -> Tokens | None:
    """The tokens of what is broadcast to the result of ``node``."""
    shape, result = _shape(source), _shape(node)
    own = Tokens(tuple(d for d in tokens.moved(len(shape) - len(result)).dims if d >= 0))
    sizes = own.sizes(shape)
    if sizes == tokens.sizes(result):
        return own
    if all(size == 1 for size in sizes):
        return None
    raise NotByToken(node, "takes batch and sequence apart")


def _reduced(node: fx.Node, tokens: Tokens) -> Tokens | None:
    """The tokens of a reduction's result."""
    rank = len(_shape(node.all_input_nodes[0]))
    named: Any = node.args[1] if len(node.args) > 1 and node.args[1] is not None else []
    dims = {d % rank for d in (named if isinstance(named, (list, tuple)) else [named])} or set(range(rank))
    over = dims & set(tokens.dims)
    if not over:
        keeps = len(node.args) > 2 and bool(node.args[2])
        return tokens if keeps else Tokens(tuple(d - sum(gone < d for gone in dims) for d in tokens.dims))
    if len(over) < len(tokens.dims) or node.target not in SUMS | MEANS:
        raise NotByToken(node, "does more than sum over tokens")
    return None


def _viewed(node: fx.Node, before: Sequence[int], tokens: Tokens, after: Sequence[int]) -> Tokens:
    """The tokens of what has sizes ``before`` where it is seen with sizes ``after``."""
    dims: list[int] = []
    for first, last in tokens.runs():
        dims += _same_numbers(node, math.prod(before[:first]), math.prod(before[first:last]), after)
    return Tokens(tuple(dims))


def _same_numbers(node: fx.Node, ahead: int, count: int, sizes: Sequence[int]) -> range:
    """The dimensions of ``sizes`` that count ``count``, behind others that count ``ahead``."""
    for begin in range(len(sizes)):
        for end in range(begin + 1, len(sizes) + 1):
            if math.prod(sizes[:begin]) == ahead and math.prod(sizes[begin:end]) == count:
                return range(begin, end)
    raise NotByToken(node, "mixes tokens with something else")


PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
"""The products at which a region begins."""
SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
MEANS = frozenset({aten.mean.default, aten.mean.dim})
"""Means: over all tokens, the sum of the tiles' means, each times its share of the tokens."""
_REDUCTIONS = SUMS | MEANS | {aten.amax.default, aten.argmax.default, aten.any.dim, aten.any.dims}
_SIZED: Mapping[Any, int] = {
    aten.view.default: 1, aten.reshape.default: 1, aten._unsafe_view.default: 1, aten.expand.default: 1,
    aten.full.default: 0,
}  # fmt: skip
"""Where operators are given the sizes of their result."""
_VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
_SEVERAL: Mapping[Any, tuple[int, str]] = {
    aten.split.Tensor: (2, ""), aten.split_with_sizes.default: (2, ""), aten.var_mean.correction: (1, "keepdim"),
}  # fmt: skip
"""Operators that make several tensors, along which dimensions, and what says that these stay."""
_CONSTANTS = frozenset({
    aten.full.default, aten.scalar_tensor.default, aten.arange.start_step, prims.iota.default,
    aten.unsqueeze.default, aten.expand.default,
})  # fmt: skip
_ALONG = frozenset({
    aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.cat.default,
})  # fmt: skip
"""They work along one dimension, their second argument."""
_ALSO_POINTWISE = frozenset({
    prims.convert_element_type.default, aten.alias.default, aten.clone.default, aten.expand.default, aten.full.default,
})  # fmt: skip

dims_of_result, dims_of_operand, SIZED, VIEWS = _result, _operand, _SIZED, _VIEWS
"""For regions of another dimension than tokens (:mod:`zerograph.tiling.middle`)."""
