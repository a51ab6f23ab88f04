"""The middle of an MLP: the part of a graph that can run for some of the hidden dimension at a time, weights included.

Every value that has the hidden dimension is made of the weights of the linear layers around it, of which it is a
dimension too: rows of the first ones and columns of the second (the other way round where inputs are rows). So the
middle is all that follows from these weights, up to products that sum over the hidden dimension and to the weights'
gradients. Each of its operators treats every place of that dimension by itself, which
:mod:`zerograph.tiling.token_region` knows of tokens. An input from outside with the dimension, such as a bias, is cut.

A graph may need several *loops* over the dimension, one after another: where a sum is read by what leads to the middle
again, as in a backward that first computes its layer anew, or of weights that are used twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zerograph.core.step import Mlp
from zerograph.graph.nodes import Marker, is_identity_view, markers
from zerograph.graph.ops import REDUCE_GRAD, UNSHARD
from zerograph.tiling.cuts import PRODUCTS, SIZED, SUMS, VIEWS, Cut, Mixes, cut_of_operand, cut_of_result, is_pointwise
from zerograph.tiling.products import is_cast, is_transpose, readers_of, tilable
from zerograph.tiling.region import Counts, Growth, Region

aten = torch.ops.aten


@dataclass(slots=True, kw_only=True)
class Middle(Region):
    """The operators that run for some of the hidden dimension at a time.

    Attributes:
        weights: markers that gather the weights, with the dimension of each that is hidden.
        gradients: of what is inside, the markers that reduce the gradients of the weights.
    """

    weights: dict[fx.Node, Cut]
    gradients: set[fx.Node] = field(default_factory=set)

    def exits(self, counts: Counts = lambda _: True) -> list[fx.Node]:
        """The nodes whole behind a loop, in order: sums, and those returned or read outside by a node that
        ``counts``."""

        def leaves(node: fx.Node) -> bool:
            if _is_fill(node):
                return False  # others read what stays where it is
            if self.cuts[node] is None:
                return bool(node.users)
            return any(user not in self.cuts and (user.op == "output" or counts(user)) for user in node.users)

        return sorted(node for node in self.cuts if node in self.gradients or leaves(node))

    def loops(self) -> list[list[fx.Node]]:
        """The exits of each loop, in order: those that depend on an earlier one's through something outside."""
        level: dict[fx.Node, int] = {}
        exits, last = self.exits(), max(self.cuts)
        node = min(self.cuts)
        while node is not last.next:
            # A sum over the dimension is there behind its loop, and so is what is read outside.
            within = self.cuts.get(node) is not None
            behind = (
                level.get(n, 0) + (n in self.cuts and not (within and self.cuts[n] is not None))
                for n in node.all_input_nodes
                if not _is_fill(n)
            )
            level[node] = max(behind, default=0)
            node = node.next
        # A sum is made in the loop that makes its factors.
        for node in (n for n in exits if self.cuts[n] is None):
            terms = node.args[-2:] if node.target in PRODUCTS else node.args[:1]
            level[node] = max(level.get(n, 0) + (self.cuts.get(n, 0) is None) for n in terms)  # type: ignore[arg-type, misc]
        return [[node for node in exits if level[node] == number] for number in sorted({level[n] for n in exits})]

    def needed(self, exits: list[fx.Node]) -> set[fx.Node]:
        """The nodes inside that ``exits`` are computed from, themselves included."""
        found, waiting = set[fx.Node](), list(exits)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [n for n in node.all_input_nodes if self.cuts.get(n) is not None]
        return found


@dataclass(frozen=True, slots=True)
class Gathered:
    """The parameters that a graph gathers.

    Attributes:
        markers: by parameter, the ``unshard`` markers of it.
        alone: the nodes that are made of nothing but gathered parameters.
    """

    markers: Mapping[str, Sequence[Marker]]
    alone: Set[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> Gathered:
        found, alone = dict[str, list[Marker]](), set[fx.Node]()
        for marker in markers(graph, UNSHARD):
            found.setdefault(marker.name, []).append(marker)
        for node in graph.nodes:
            sources = node.all_input_nodes
            if node.target is UNSHARD or (sources and alone.issuperset(sources)):
                alone.add(node)
        return cls(found, alone)


def middle_of(read: Gathered, weights: Mapping[str, int], counts: Counts = lambda _: True) -> Middle:
    """The middle between ``weights``, by parameter with the dimension that is hidden.

    Args:
        read: what their graph gathers.
        counts: whether a node that reads something is part of what is looked at.

    Raises:
        Mixes: something does not treat every place of the hidden dimension by itself.
    """
    nodes = {marker.node: Cut((dim,)) for name, dim in weights.items() for marker in read.markers.get(name, ())}
    growth = _MiddleGrowth(Middle(weights=nodes), weights, read.alone, counts)
    try:
        growth.grow()
    except Mixes as error:
        error.place = "place of the hidden dimension"
        raise
    return growth.region


class _MiddleGrowth(Growth):
    region: Middle
    in_loops = True

    def __init__(self, middle: Middle, weights: Mapping[str, int], alone: Set[fx.Node], counts: Counts) -> None:
        super().__init__(middle, counts)
        self.names, self.alone = weights, alone
        self.waiting: list[fx.Node] = []
        self.hidden = _hidden(middle)

    def grow(self) -> None:
        """Take in all that follows from the weights."""
        for marker in self.region.weights:
            self._push(marker)
        while self.waiting:
            # In the order of the graph, so that of what a node reads it is known whether it is inside.
            node = heapq.heappop(self.waiting)
            if node in self.region.cuts or not self.counts(node) or node.op == "output":
                continue
            if node.target is REDUCE_GRAD:
                self._gradient(node)
                continue
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise Mixes(node, "makes several tensors of them")
            source = next(n for n in node.all_input_nodes if self.inside(n) is not None)
            self.enter(node, self._result(node, source), source)
        self._drop_inner()
        self.check_whole()

    def _push(self, node: fx.Node) -> None:
        """The readers of ``node`` are to be looked at."""
        for user in node.users:
            heapq.heappush(self.waiting, user)

    def _drop_inner(self) -> None:
        """Remove from the given arguments those that were found inside afterwards."""
        for (node, source), cut in list(self.region.given.items()):
            found = self.inside(source)
            if found is not None:
                if found != cut:
                    raise Mixes(node, "mixes {}s with something else")
                del self.region.given[node, source]

    def _gradient(self, node: fx.Node) -> None:
        marker = Marker(node, *node.args[3:])  # type: ignore[arg-type]
        if marker.name not in self.names:
            return  # a bias, whose gradient is there whole
        cut = Cut((self.names[marker.name],))
        if self.inside(marker.source) != cut:
            raise Mixes(node, "reduces a gradient with the hidden dimension in another place")
        self.region.cuts[node] = cut
        self.region.gradients.add(node)

    def inside(self, node: fx.Node) -> Cut | None:
        return self.region.weights.get(node) or super().inside(node)

    def entered(self, node: fx.Node, cut: Cut | None) -> None:
        if cut is not None and not _is_fill(node):
            self._push(node)

    def makes(self, node: fx.Node, source: fx.Node, cut: Cut) -> bool:
        """Whether ``source``, from outside, is as large as the middle and can be made for some of it at a time."""
        sizes = [size for size in source.meta["val"].shape if not isinstance(size, int) or size > 1]
        made = source.op == "call_function" and self.counts(source) and source not in self.alone
        target: Any = source.target
        known = target in PRODUCTS | VIEWS | SIZED.keys() or is_transpose(source) or is_pointwise(target)
        return made and known and len(sizes) > 1

    def _result(self, node: fx.Node, source: fx.Node) -> Cut | None:
        cut = self.inside(source)
        assert cut is not None
        found = self._viewed(node, source, cut) if node.target in VIEWS else cut_of_result(node, source, cut)
        if found is None and node.target not in SUMS | PRODUCTS:
            raise Mixes(node, "reads all of the hidden dimension")
        return self._of_one(node, found)

    def operand(self, node: fx.Node, source: fx.Node, cut: Cut | None) -> Cut | None:
        if cut is not None and node.target in VIEWS:
            return self._viewed(source, node, cut)
        return self._of_one(node, cut_of_operand(node, source, cut))

    def _viewed(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cut:
        """The cut of ``node`` where it has the same numbers as ``source``: first stays first, and last last. The number
        of tokens may not be known."""
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if cut.dim == len(before) - 1 and _is(after[-1], self.hidden):
            return Cut((len(after) - 1,))
        if cut.dim == 0 and _is(after[0], self.hidden):
            return cut
        raise Mixes(node, "mixes {}s with something else")

    def _of_one(self, node: fx.Node, found: Cut | None) -> Cut | None:
        if found is not None and len(found.dims) != 1:
            raise Mixes(node, "takes the hidden dimension apart")
        return found


def _is_fill(node: fx.Node) -> bool:
    """Whether ``node`` is one number everywhere: one may be shared by all layers, and leads to none."""
    return node.target is aten.full.default


def _is(size: Any, number: int) -> bool:
    # A symbolic size is never compared: torch would assume what it answers.
    return isinstance(size, int) and size == number


# ---- which weights have a middle between them


def mlps_of(graph: fx.Graph, backward: set[fx.Node]) -> Iterator[Mlp]:
    """The MLPs of ``graph``, a whole step; each weight is in one of them, and wide middles come first."""
    can = set(tilable(graph))
    found = dict[tuple[tuple[str, int], ...], Mlp]()
    read, seen = Gathered.of(graph), set[tuple[str, int]]()
    for marker in (marker for of_one in read.markers.values() for marker in of_one):
        for dim in _first_uses(marker, backward) if marker.name in can else ():
            if (marker.name, dim) not in seen and _is_wide(marker.node, dim):
                mlp = _mlp(read, backward, {marker.name: dim}, can)
                if mlp is not None:
                    found[mlp.weights] = mlp
                    seen.update(mlp.weights)
    taken, names = set[str](), set[str]()
    for mlp in sorted(found.values(), key=lambda mlp: -mlp.hidden):
        own = [name for name, _ in mlp.weights]
        if taken.isdisjoint(own):
            taken.update(own)
            # A module may hold several.
            yield mlp if mlp.name not in names else replace(mlp, name=own[0])
            names.add(mlp.name)


def _first_uses(marker: Marker, backward: set[fx.Node]) -> list[int]:
    """The dimensions of a weight that products of the forward make."""
    return sorted(
        {
            0 if transposed else 1
            for user, weight, transposed in readers_of(marker.node)
            if user not in backward and user.target in PRODUCTS and user.args[-1] is weight
        }
    )


def _mlp(read: Gathered, backward: set[fx.Node], weights: dict[str, int], can: set[str]) -> Mlp | None:
    """The MLP that ``weights`` are some of."""
    try:
        while True:
            full = middle_of(read, weights)
            more = {name: dim for name, dim in _others(full) if name in can and name not in weights}
            if not more:
                break
            weights = weights | more
        forward = middle_of(read, weights, lambda node: node not in backward)
    except Mixes:
        return None
    exits = forward.exits(lambda node: node not in backward)
    sums = [node for node in exits if node.target in PRODUCTS and forward.cuts[node] is None]
    if len(sums) < len(exits) or not sums or not _is_closed(full, backward):
        return None
    if any(_is_computed(source, read) for _, source in full.given):
        return None
    last = {m for node in sums for m in _sources(node.args[-1])}
    if not last or not last <= full.weights.keys():
        return None
    if not all(_is_wide(node, cut.dim) for node, cut in full.weights.items()):
        return None
    middle = tuple(
        node.name for node in sorted(full.cuts) if full.cuts[node] is not None and not _is_weight(node, full)
    )
    return Mlp(_name(weights), _hidden(full), tuple(sorted(weights.items())), middle)


def _is_computed(source: fx.Node, read: Gathered) -> bool:
    """Whether what is given is computed, and as large as the middle: whole, such as a mask of random numbers."""
    sizes = [size for size in source.meta["val"].shape if not isinstance(size, int) or size > 1]
    return source.op == "call_function" and len(sizes) > 1 and source not in read.alone


def _is_closed(full: Middle, backward: set[fx.Node]) -> bool:
    """Whether nothing but sums, and gradients of weights and biases, leaves the backward's middle."""
    return all(
        full.cuts[node] is None or node in full.gradients or all(u.target is REDUCE_GRAD for u in node.users)
        for node in full.exits()
        if node in backward
    )


def _others(middle: Middle) -> Iterator[tuple[str, int]]:
    """Weights that products inside read, and that are cut."""
    for (node, source), cut in middle.given.items():
        transposed = False
        while source.target is not UNSHARD:
            if not (is_transpose(source) or is_identity_view(source) or is_cast(source)):
                break
            transposed ^= is_transpose(source)
            source = source.args[0]  # type: ignore[assignment]
        if source.target is UNSHARD and node.target in PRODUCTS and source.meta["val"].dim() == 2:
            yield str(source.args[2]), 1 - cut.dim if transposed else cut.dim


def _sources(node: Any) -> list[fx.Node]:
    """The marker that ``node`` is a view or cast of."""
    while node.target is not UNSHARD:
        if not (is_transpose(node) or is_identity_view(node) or is_cast(node)):
            return []
        node = node.args[0]
    return [node]


def _is_wide(marker: fx.Node, dim: int) -> bool:
    """Whether the hidden dimension of a weight is larger than the other: else it is not what takes memory."""
    shape = marker.meta["val"].shape
    return bool(shape[dim] > shape[1 - dim])


def _hidden(middle: Middle) -> int:
    """Size of the hidden dimension."""
    return next((int(node.meta["val"].shape[cut.dim]) for node, cut in middle.weights.items()), 0)


def _is_weight(node: fx.Node, full: Middle) -> bool:
    """Whether it is a weight, or the gradient of one: views and casts of it too."""
    if node in full.gradients or (full.cuts[node] is not None and _leads_to_gradient(node, full)):
        return True
    while node not in full.weights:
        if not (is_transpose(node) or is_identity_view(node) or is_cast(node)):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def _leads_to_gradient(node: fx.Node, full: Middle) -> bool:
    """Whether nothing but the reduction reads it, through views and casts."""
    readers = {user for user, *_ in readers_of(node)}
    return bool(readers) and readers <= full.gradients


def _name(names: Mapping[str, int]) -> str:
    """The module that holds all of ``names``."""
    parts = [name.split(".")[:-1] for name in names]
    common = []
    for same in zip(*parts, strict=False):
        if len(set(same)) > 1:
            break
        common.append(same[0])
    return ".".join(common) or min(names)
