"""How operators treat dimensions that are cut: each keeps them, sums over them, or mixes them.

Tokens are such dimensions (batch and sequence), and so is the batch alone. In a part every value has as many dimensions
as in the graph. Where several are cut, the last of them counts the part's, and the others are 1. The batch is one
dimension, which may count something else within each sample: its tokens, its heads.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from zerograph.graph.attention import ATTENTION, ATTENTION_BACKWARD, is_random
from zerograph.graph.nodes import COPIES, aten, is_view
from zerograph.graph.torch_private import OpOverload, named_arguments

prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimensions ``dims`` of a value, in order, are cut.

    Attributes:
        samples: of a cut between samples of a batch, how many there are; each has as many places of the dimension.
            None where every place is by itself.
    """

    dims: tuple[int, ...]
    samples: int | None = None

    @property
    def dim(self) -> int:
        """The dimension that counts what is in a part."""
        return self.dims[-1]

    def at(self, dims: Iterable[int]) -> Cut:
        """The same, of a value that has it in ``dims``."""
        return replace(self, dims=tuple(dims))

    def moved(self, by: int) -> Cut:
        """The same, ``by`` dimensions farther on."""
        return self.at(dim + by for dim in self.dims)

    def without(self, dims: Collection[int]) -> Cut:
        """The same, of a value that lacks ``dims``."""
        return self.at(dim - sum(gone < dim for gone in dims) for dim in self.dims if dim not in dims)

    def beside(self, dims: Iterable[int]) -> Cut:
        """The same, of a value that has ``dims`` too; what :meth:`without` undoes."""
        found = self
        for new in sorted(dims):
            found = found.at(dim + int(new <= dim) for dim in found.dims)
        return found

    def places(self, node: fx.Node) -> int:
        """Places of the dimension that belong to one of what is counted, in what ``node`` makes."""
        return shape_of(node)[self.dim] // self.samples if self.samples else 1

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Those of ``shape`` that are cut."""
        return tuple(shape[dim] for dim in self.dims)

    def of_part(self, shape: Sequence[Any], count: int) -> list[Any]:
        """``shape``, of a part that has ``count`` places of the dimension."""
        return [count if d == self.dim else 1 if d in self.dims else size for d, size in enumerate(shape)]

    def runs(self) -> list[tuple[int, int]]:
        """The dimensions as ranges of neighbours, each from its first to before its end."""
        found: list[tuple[int, int]] = []
        for dim in self.dims:
            begin = found.pop()[0] if found and found[-1][1] == dim else dim
            found.append((begin, dim + 1))
        return found


ROWS = Cut((0,))
COLUMNS = Cut((1,))


class Mixes(Exception):
    """Why something has to exist whole.

    Attributes:
        node: what needs it.
        place: what the dimension counts; stands in place of {} in the reason.
    """

    def __init__(self, node: fx.Node, why: str, place: str = "token") -> None:
        super().__init__(node, why)
        self.node, self.why, self.place = node, why, place

    def __str__(self) -> str:
        return f"{self.node.target} {self.why.format(self.place)}"


def cut_of_result(node: fx.Node, source: fx.Node, cut: Cut) -> Cut | None:
    """The dimensions of what ``node`` makes that are cut, if those of ``source`` are; None where it sums over them.

    Raises:
        Mixes: it does not treat them place by place, or nobody knows.
    """
    target: Any = node.target
    if target in SEVERAL:
        return _of_several(node, cut).without(_unbound(node))
    if target in PRODUCTS:
        *bias, left, right = node.args
        if left is not right and not {left, right}.intersection(bias) and not node.kwargs:
            if source in bias:
                return cut.moved(2 - len(shape_of(source)))
            return cut if cut.dims == (ROWS if source is left else COLUMNS).dims else None
    elif target in BATCHED:
        if cut.dims == ROWS.dims:
            return cut
    elif target in ATTENTION:
        return _of_attention(node, cut)
    elif target is operator.getitem and source.target in SEVERAL:
        return cut
    elif target is operator.getitem and source.target in ATTENTION:
        return cut if _is_by_sample(node) else cut.at(())
    elif target in _REDUCTIONS:
        return _reduced(node, cut)
    elif target in VIEWS:
        return _viewed(node, shape_of(source), cut, shape_of(node))
    elif (order := _order(node)) is not None:
        return _in_order(node, cut, [order.index(d) for d in cut.dims])
    elif target is aten.unsqueeze.default:
        return cut.beside([_dim(node)])
    elif target is aten.select.int:
        if (gone := _selected(node)) not in cut.dims:
            return cut.without([gone])
    elif target is aten.select_scatter.default:
        found = cut if source is node.args[0] else cut.beside([_selected(node)])
        if _selected(node) not in found.dims:
            return found
    elif _works_by_place(node, cut.moved(rise := len(shape_of(node)) - len(shape_of(source)))):
        return cut.moved(rise)
    raise Mixes(node, "is not known to treat every {} by itself")


def cut_of_operand(node: fx.Node, source: fx.Node, cut: Cut | None) -> Cut | None:
    """The dimensions of an argument that are cut, if ``cut`` are those of the result; None where it is read whole.

    Raises:
        Mixes: it does not treat them place by place, or nobody knows.
    """
    target: Any = node.target
    if target in PRODUCTS:
        left, right = node.args[-2:]
        if source not in (left, right):
            return _aligned(node, source, cut) if cut is not None else None
        if cut is None:
            return COLUMNS if source is left else ROWS
        return cut if cut.dims == (ROWS if source is left else COLUMNS).dims else None
    if cut is not None:
        if target is operator.getitem and source.target in SEVERAL:
            return cut
        if target is operator.getitem and source.target in ATTENTION:
            return cut.at(ROWS.dims)
        if target in BATCHED and cut.dims == ROWS.dims:
            return cut if source in node.args[-2:] else _aligned(node, source, cut)
        if target in ATTENTION:
            return _given_to_attention(node, source, cut)
        if target in SEVERAL:
            return _of_several(node, cut.beside(_unbound(node)))
        if target in VIEWS:
            return _viewed(node, shape_of(node), cut, shape_of(source))
        if (order := _order(node)) is not None:
            return _in_order(node, cut, [order[d] for d in cut.dims])
        if target is aten.unsqueeze.default:
            return cut.without([_dim(node)])
        if target is aten.select.int:
            return cut.beside([_selected(node)])
        if target is aten.select_scatter.default and _selected(node) not in cut.dims:
            return cut if source is node.args[0] else cut.without([_selected(node)])
        if target in _REDUCTIONS:
            if not _keeps(node):
                return cut.beside(_over(node))
            if _over(node).isdisjoint(cut.dims):
                return cut
            raise Mixes(node, "makes one number of several {}s")
        if is_slice_of(node, cut):
            if source is sliced(node):
                return cut
            if is_zeros(source):
                return None
            raise Mixes(node, "writes some {}s among others")
        if _works_by_place(node, cut):
            return _aligned(node, source, cut)
    raise Mixes(node, "is not known to treat every {} by itself")


def is_slice_of(node: fx.Node, cut: Cut) -> bool:
    """Whether ``node`` keeps some places of what is ``cut``, or writes some among others."""
    return node.target in SLICES and sliced_dim(node) in cut.dims


def sliced(node: fx.Node) -> fx.Node:
    """The tensor that a slice is of, or that it writes."""
    return node.args[1 if node.target is aten.slice_scatter.default else 0]  # type: ignore[return-value]


def sliced_dim(node: fx.Node) -> int:
    """The dimension that a slice is along."""
    named: Any = node.args[SLICES[node.target] :][:1] or (0,)
    return named[0] % len(node.args[0].meta["val"].shape)  # type: ignore[union-attr, no-any-return]


def is_zeros(node: Any) -> bool:
    """Whether ``node`` makes zeros."""
    filled = isinstance(node, fx.Node) and node.target in _FILLED
    return filled and bool(node.args[_FILLED[node.target]] == 0)


Linear = Literal["each", "both", "first", "factor and term"]


def linear_in(node: fx.Node) -> Linear | None:
    """In which of its first arguments ``node`` is linear: in each of two, in both at once, in the first, in one of two
    factors and a term at once, or in none."""
    if node.target is aten.constant_pad_nd.default and any(node.args[2:]):
        return None  # pads with another number than zero
    return "first" if is_view(node) else _LINEAR.get(node.target)


def is_pointwise(target: Any) -> bool:
    """Whether the operator makes each number of those in the same place."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def shape_of(node: fx.Node) -> list[int]:
    """The sizes of what ``node`` makes."""
    return list(node.meta["val"].shape)


def _of_several(node: fx.Node, cut: Cut) -> Cut:
    """The cut of what ``node`` makes several tensors of, which each has too."""
    at, keeps = SEVERAL[node.target]
    dims = _over(node) if keeps else {_dim_of_first(node, at)}
    if not dims.isdisjoint(cut.dims) or (keeps and not node.kwargs.get(keeps)):
        raise Mixes(node, "makes several tensors of them")
    return cut


def _unbound(node: fx.Node) -> list[int]:
    """The dimension that each of several tensors lacks, if they lack one."""
    return [_dim_of_first(node, 1)] if node.target is aten.unbind.int else []


def _dim_of_first(node: fx.Node, at: int) -> int:
    """Argument ``at``, as a dimension of the first one."""
    dim: Any = node.args[at] if len(node.args) > at else 0
    return dim % len(shape_of(node.all_input_nodes[0]))  # type: ignore[no-any-return]


def _is_by_sample(node: fx.Node) -> bool:
    """Whether a result of attention has the batch: a forward's are what it makes, and the logarithms of its sums."""
    op, at = node.args
    return isinstance(op, fx.Node) and (op.target in ATTENTION_BACKWARD or at in (0, 1))


def _of_attention(node: fx.Node, cut: Cut) -> Cut:
    """The cut of what attention makes: it treats every sample by itself, and draws no numbers without dropout."""
    if cut.dims != ROWS.dims or not cut.samples:
        raise Mixes(node, "has {}s elsewhere than in its first dimension")
    if is_random(node):
        raise Mixes(node, "is random: a part of it would be another one")
    return cut


def _given_to_attention(node: fx.Node, source: fx.Node, cut: Cut) -> Cut | None:
    cut = _of_attention(node, cut.at(ROWS.dims))
    given = named_arguments(node.target, node.args, node.kwargs)
    names = {name for name, value in given.items() if value is source}
    if names <= _MASKS:
        # One for all samples may have fewer dimensions, or 1 in place of them.
        return cut if len(shape_of(source)) == 4 and shape_of(source)[0] != 1 else None
    if names <= _BY_SAMPLE:
        return cut
    return cut.at(()) if source.target is operator.getitem else None  # the state of a generator: each part has its own


def _works_by_place(node: fx.Node, cut: Cut) -> bool:
    target: Any = node.target
    if target in SLICES:
        return True  # along other dimensions, or a window
    if target in _ALONG:
        # An index that has fewer places is not repeated for the others.
        alike = all(shape_of(source)[d] == shape_of(node)[d] for source in node.all_input_nodes for d in cut.dims)
        return alike and _dim(node) not in cut.dims
    if (moved := _moved(node)) is not None:
        return moved.isdisjoint(cut.dims)
    return is_pointwise(target) or target in ALSO_POINTWISE


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return dim % len(shape_of(node))  # type: ignore[no-any-return]


def _moved(node: fx.Node) -> set[int] | None:
    """The dimensions of which an operator moves, repeats or adds places; None of other operators."""
    target, given, rank = node.target, list[Any](node.args[1:]), len(shape_of(node))
    if target is prims.rev.default:
        return {dim % rank for dim in given[0]}
    if target is aten.constant_pad_nd.default:  # two numbers for each, the last one's first
        return {rank - 1 - at // 2 for at, count in enumerate(given[0]) if count}
    if target is aten.repeat.default:
        return {dim for dim, times in enumerate(given[0]) if times != 1}
    return None


def _selected(node: fx.Node) -> int:
    """The dimension of which one place is taken, or written."""
    return _dim_of_first(node, _SELECTS[node.target])


def _order(node: fx.Node) -> list[int] | None:
    """The order in which a transpose has the dimensions of what it reads."""
    if node.target is not aten.permute.default:
        return None
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def _in_order(node: fx.Node, cut: Cut, dims: list[int]) -> Cut:
    if dims != sorted(dims):
        raise Mixes(node, "puts sequence before batch")
    return cut.at(dims)


def _aligned(node: fx.Node, source: fx.Node, cut: Cut) -> Cut | None:
    """The cut of what is broadcast to the result of ``node``."""
    shape, result = shape_of(source), shape_of(node)
    own = cut.at(d for d in cut.moved(len(shape) - len(result)).dims if d >= 0)
    sizes = own.sizes(shape)
    if sizes == cut.sizes(result):
        return own
    if all(size == 1 for size in sizes):
        return None
    raise Mixes(node, "takes batch and sequence apart")


def _reduced(node: fx.Node, cut: Cut) -> Cut | None:
    """The cut of a reduction's result."""
    dims = _over(node)
    over = dims & set(cut.dims)
    if not over:
        return cut if _keeps(node) else cut.without(dims)
    if len(over) < len(cut.dims) or node.target not in SUMS | MEANS:
        raise Mixes(node, "does more than sum over {}s")
    return None


def _over(node: fx.Node) -> set[int]:
    """The dimensions that a reduction is over."""
    rank = len(shape_of(node.all_input_nodes[0]))
    named: Any = node.args[1] if len(node.args) > 1 and node.args[1] is not None else []
    return {d % rank for d in (named if isinstance(named, (list, tuple)) else [named])} or set(range(rank))


def _keeps(node: fx.Node) -> bool:
    """Whether a reduction leaves what it is over as dimensions of 1."""
    return len(node.args) > 2 and bool(node.args[2])


def _viewed(node: fx.Node, before: Sequence[int], cut: Cut, after: Sequence[int]) -> Cut:
    """The cut of what has sizes ``before`` where it is seen with sizes ``after``."""
    dims: list[int] = []
    for first, last in cut.runs():
        ahead = math.prod(before[:first])
        if cut.samples:
            dims.append(_with_samples(node, ahead, cut.samples, after))
        else:
            dims += _same_numbers(node, ahead, math.prod(before[first:last]), after)
    return cut.at(dims)


def _with_samples(node: fx.Node, ahead: int, samples: int, sizes: Sequence[int]) -> int:
    """The dimension of ``sizes`` that counts ``samples``, or places of them, behind others that count ``ahead``."""
    for dim, size in enumerate(sizes):
        if math.prod(sizes[:dim]) == ahead and size > 1:
            if size % samples:
                break
            return dim
    raise Mixes(node, "mixes {}s with something else")


def _same_numbers(node: fx.Node, ahead: int, count: int, sizes: Sequence[int]) -> range:
    """The dimensions of ``sizes`` that count ``count``, behind others that count ``ahead``."""
    for begin in range(len(sizes)):
        for end in range(begin + 1, len(sizes) + 1):
            if math.prod(sizes[:begin]) == ahead and math.prod(sizes[begin:end]) == count:
                return range(begin, end)
    raise Mixes(node, "mixes {}s with something else")


PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
"""Products of two matrices."""
BATCHED = frozenset({aten.bmm.default, aten.baddbmm.default})
"""Products of as many pairs of matrices as their first dimension counts."""
SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
MEANS = frozenset({aten.mean.default, aten.mean.dim})
"""Means: over everything, the sum of the parts' means, each times its share."""
SLICES: Mapping[Any, int] = {aten.slice.Tensor: 1, aten.slice_scatter.default: 2}
"""Operators that slice, and where their arguments name the dimension."""
SIZED: Mapping[Any, int] = {
    aten.view.default: 1, aten.reshape.default: 1, aten.expand.default: 1, aten.full.default: 0,
}  # fmt: skip
"""Where operators are given the sizes of their result."""
VIEWS = frozenset({aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims})
"""Tiles that were written before have reshapes."""
SEVERAL: Mapping[Any, tuple[int, str]] = {
    aten.split.Tensor: (2, ""), aten.split_with_sizes.default: (2, ""), aten.var_mean.correction: (1, "keepdim"),
    aten.unbind.int: (1, ""),
}  # fmt: skip
"""Operators that make several tensors, along which dimensions, and of a reduction what says that these stay."""
_FILLED: Mapping[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0}
"""Where operators that fill a tensor with one number are given it."""
_LINEAR: Mapping[Any, Linear] = {
    prims.fma.default: "factor and term",  # of a softmax's gradient
    aten.mul.Tensor: "each", aten.mm.default: "each", aten.add.Tensor: "both", aten.sub.Tensor: "both",
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default, aten.neg.default, aten.div.Tensor), "first"),
    **dict.fromkeys((aten.div.Scalar, aten.mul.Scalar, aten.gather.default, aten.constant_pad_nd.default), "first"),
    **dict.fromkeys(COPIES, "first"),
}  # fmt: skip
_SELECTS: Mapping[Any, int] = {aten.select.int: 1, aten.select_scatter.default: 2}
"""Operators that take one place of a dimension, or write it, and where their arguments name the dimension."""
_REDUCTIONS = SUMS | MEANS | {aten.amax.default, aten.argmax.default, aten.any.dim, aten.any.dims}
_ALONG = frozenset({
    aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.cat.default,
    aten.cumsum.default,
})  # fmt: skip
"""They work along one dimension."""
_BY_SAMPLE = frozenset({"query", "key", "value", "out", "logsumexp", "grad_out", "grad_out_"})
_MASKS = frozenset({"attn_mask", "attn_bias"})
"""Arguments of attention."""
ALSO_POINTWISE = COPIES | {aten.alias.default, aten.expand.default, aten.full.default}
