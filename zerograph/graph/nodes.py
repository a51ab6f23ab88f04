"""Tools that passes share: reading markers, no-op views, and the typed facts they leave on nodes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from zerograph.core.errors import InvariantError
from zerograph.core.machine import Tier
from zerograph.core.plan import Bucket, Param, ParamTile
from zerograph.graph.descent import descend, reached
from zerograph.graph.ops import ACCUMULATE, REDUCE_GRAD, UNSHARD, VIEW
from zerograph.graph.torch_private import OpOverload

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, torch.ops.prims.convert_element_type.default})
"""Operators that copy numbers, maybe into another dtype: Inductor decomposes other casts."""


@dataclass(frozen=True, slots=True)
class BucketFact:
    """The fact on every ``zg::`` node that moves a bucket, or a tile of one: which, and its parameters, in order.

    Attributes:
        term: the gradient of a tile may be reduced in several.
        by_gather: of a wait for a fetch, whether the gather behind it waits in its stream, and what computes does not.
    """

    bucket: int
    params: tuple[Param, ...]
    tile: int = 0
    tiles: int = 1
    term: int = 0
    by_gather: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """The part that it moves, as the node's arguments have it: the bucket, and in a bucket of tiles the tile."""
        return (self.bucket,) if self.tiles == 1 else (self.bucket, self.tile)


@dataclass(frozen=True, slots=True)
class TileFact:
    """The fact on markers of one tile of a parameter.

    Attributes:
        index: of the tile.
        param: the tile, as a parameter.
        term: of what its gradient is the sum of, where tiles of tokens are reduced one by one.
    """

    index: int
    param: ParamTile
    term: int = 0


@dataclass(frozen=True, slots=True)
class TokenTile:
    """The fact on operators of one tile of tokens: into how many the plan divides them."""

    tiles: int


@dataclass(frozen=True, slots=True)
class Activation:
    """The fact on operators of the forward: what plans call their result."""

    name: str


@dataclass(frozen=True, slots=True)
class LayerGradient(Activation):
    """The fact on a product of the backward at which a layer begins that runs for some samples at a time: it bears the
    name of the forward's, and says of how many ``samples`` its rows are."""

    samples: int


@dataclass(frozen=True, slots=True)
class SavedFact:
    """The fact on every ``zg::`` node that moves what the forward saves: of whom, to or from which tier.

    Attributes:
        label: the layer or activation that the plan names.
        bytes: by tensor, of the memory that it looks at; 0 where an earlier one looks at the same.
        memory: by tensor, the first one that looks at the same memory.
    """

    label: str
    tier: Tier
    bytes: tuple[int, ...]
    memory: tuple[int, ...]


class Pair(NamedTuple):
    """A forward and its backward; the first ``outputs`` that the forward returns are the user's, the rest is saved."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int


@dataclass(frozen=True, slots=True)
class Marker:
    """An ``unshard`` or ``reduce_grad`` node, read."""

    node: fx.Node
    name: str
    group: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    sharded: bool
    device: torch.device | None = None

    @property
    def source(self) -> fx.Node:
        """The shard (``unshard``) or the full gradient (``reduce_grad``)."""
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def tile(self) -> TileFact | None:
        """The tile of the parameter that it is of; None where it is of all of it."""
        fact = self.node.meta.get("zg")
        return fact if isinstance(fact, TileFact) else None


def part_of_plan(marker: Marker, bucket: Bucket) -> tuple[int, ...]:
    """The part that has the parameter of ``marker``, or its tile, as :attr:`BucketFact.part` has it."""
    tile = marker.tile
    return BucketFact(bucket.index, (), *((tile.index, bucket.tiles) if tile is not None else ())).part


def transfer_of(found: Sequence[Marker], bucket: Bucket) -> BucketFact:
    """The transfer of the parameters of markers: of one bucket, or of one tile."""
    tile = found[0].tile
    if tile is not None:
        return BucketFact(bucket.index, (tile.param,), tile.index, bucket.tiles, tile.term)
    params = {p.name: p for p in bucket.params}
    return BucketFact(bucket.index, tuple(params[m.name] for m in found))


SPEC_AT = {UNSHARD: 2, REDUCE_GRAD: 3}
"""Where a parameter's spec begins among a marker's arguments; it begins with the parameter's name."""


def markers(graph: fx.Graph, target: Any) -> list[Marker]:
    """All ``unshard`` or all ``reduce_grad`` nodes in execution order."""
    nodes = graph.find_nodes(op="call_function", target=target, sort=True)
    return [Marker(n, *n.args[SPEC_AT[target] :]) for n in nodes]  # type: ignore[arg-type]


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are tagged as backward, and all nodes that depend on them."""
    tagged = (node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_backward")
    return set(reached(tagged, lambda node: node.users))  # a node that a pass inserts has no tag of its own


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` only looks at its first argument's memory."""
    return node.op == "call_function" and (_is_view_op(node.target) or _is_view_part(node))


def _is_view_op(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.is_view


def _is_view_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_view_op(node.args[0].target)


def is_identity_view(node: fx.Node) -> bool:
    """Whether ``node`` is a view with the very shape and strides of its argument."""
    return is_view(node) and left_as_it_is(node) is not None


def left_as_it_is(node: fx.Node) -> fx.Node | None:
    """The tensor of which ``node`` is a view with its very shape and strides, or which it writes over all of another.

    Sizes are compared as expressions: asking torch would make it assume what it answers.
    """
    scatters = node.target is aten.slice_scatter.default
    source = node.args[1] if scatters else node.args[0] if is_view(node) else None
    if not isinstance(source, fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return None
    same = expressions_of(before.shape) == expressions_of(after.shape)
    return source if same and (scatters or expressions_of(before.stride()) == expressions_of(after.stride())) else None


def expressions_of(sizes: Iterable[int | torch.SymInt]) -> list[Any]:
    """``sizes``, fit to be compared: torch assumes, with a guard, the answer to a comparison of those that are open."""
    return [size if isinstance(size, int) else size.node.expr for size in sizes]


def behind_identity(node: fx.Node) -> fx.Node:
    """``node``, or what it is an identity view of."""
    while is_identity_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def readings_of_overwritten(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that read, or view, an input that one of ``nodes``, in order, overwrites (a counter in a buffer)."""
    changing, found = {n.args[0] for n in nodes if n.target is aten.copy_.default}, list[fx.Node]()
    for node in nodes:
        reads = node.op == "call_function" and node.target is not aten.copy_.default
        if reads and not changing.isdisjoint(node.all_input_nodes):
            found.append(node)
            if is_view(node):
                changing.add(node)
    return found


CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
"""A call under ``torch.utils.checkpoint``: its first argument names the graph that runs there."""


def graph_named(gm: fx.GraphModule, node: Any) -> fx.GraphModule | None:
    """The graph that ``node`` names, as a checkpointed region has one; None where it names none."""
    found = getattr(gm, str(node.target), None) if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def is_size(node: fx.Node) -> bool:
    """Whether ``node`` is arithmetic on symbolic sizes only."""
    return is_made_of(lambda n: isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)), node)


def is_made_of(fits: Callable[[fx.Node], bool], node: fx.Node) -> bool:
    """Whether ``node`` and all that it is computed from are such as ``fits`` says."""
    return all(map(fits, reached([node], lambda one: one.all_input_nodes)))


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Execution order of all nodes."""
    return {node: index for index, node in enumerate(graph.nodes)}


def output_of(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    return next(iter(graph.find_nodes(op="output")))


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], val: Any, like: fx.Node | None = None) -> fx.Node:
    """Insert a call at the graph's insertion point, with its fake value and the source location of ``like``."""
    node = graph.call_function(target, args)
    node.meta["val"] = val
    if like is not None:
        for key in ("stack_trace", "nn_module_stack", "partitioner_tag", "seq_nr"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
    return node


def computed(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: Mapping[str, Any] = MappingProxyType({})
) -> fx.Node:
    """Insert a call as :func:`call` does; fake tensors tell what it makes, in ``like``'s mode where it reads none."""
    given, named = fx.node.map_arg((args, dict(kwargs)), lambda n: n.meta["val"])  # type: ignore[arg-type, misc]
    made = like.meta["val"]
    with (made[0] if isinstance(made, (tuple, list)) else made).fake_mode:
        val = target(*given, **named)
    node = call(graph, target, args, val, like)
    node.kwargs = dict(kwargs)
    return node


def part_of(graph: fx.Graph, source: fx.Node, dim: int, begin: int, end: int, like: fx.Node) -> fx.Node:
    """Insert a tile's view of ``source``."""
    return call(graph, VIEW, (source, dim, begin, end), source.meta["val"].narrow(dim, begin, end - begin), like)


def added(graph: fx.Graph, terms: Sequence[fx.Node], into: fx.Node | None, like: fx.Node) -> fx.Node:
    """Add a tile's term, or the product of two, to the sum of all tiles in place of ``like``.

    16 bits would round after every tile: their sums are in float32. Integers stay what they are.
    """
    val = like.meta["val"]
    dtype = torch.promote_types(val.dtype, torch.float32) if val.is_floating_point() else val.dtype
    summed = val.new_empty(val.shape, dtype=dtype)
    return call(graph, ACCUMULATE, (list(terms), into), summed, like)


def move_users_after(node: fx.Node) -> None:
    """Move readers of a gradient (views, a sum that did not merge) behind ``node``, which now gives it."""

    def moved(node: fx.Node) -> Iterator[tuple[fx.Node]]:
        for user in list(node.users):
            if user.op != "output" and user < node:
                node.append(user)
                yield (user,)

    descend(moved, node)


def move_needed_before(first: fx.Node, inside: Set[fx.Node]) -> None:
    """Move what is outside, stands behind ``first`` and is needed by what is ``inside`` before it, in order."""
    needed, node = set(inside), max(inside)
    while node > first:
        if not needed.isdisjoint(node.users):
            needed.add(node)
        node = node.prev
    for node in sorted(node for node in needed - inside if node > first):
        first.prepend(node)


def protect_outputs(graph: fx.Graph) -> None:
    """Let the graph return copies of full parameters, which are freed, and of views of them."""
    output = output_of(graph)
    for marker in markers(graph, UNSHARD):
        for node in with_views(marker.node):
            if output in node.users:
                with graph.inserting_before(output):
                    copy = call(graph, aten.clone.default, (node,), node.meta["val"].clone(), node)
                output.replace_input_with(node, copy)


def with_views(node: fx.Node) -> Iterator[fx.Node]:
    """``node``, and the views of it."""
    return reached([node], lambda one: filter(is_view, one.users))


def broken(node: fx.Node, what: str) -> InvariantError:
    """The error for an invariant that does not hold at ``node``: with its parameters, neighbours and source line."""
    fact = node.meta.get("zg")
    params = ", ".join(p.name for p in fact.params) if isinstance(fact, BucketFact) else "-"
    lines = re.findall(r'File "[^"]+", line \d+', node.meta.get("stack_trace") or "")
    where = lines[-1] if lines else "unknown source line"
    return InvariantError(
        f"{node.name}: {what} (parameters: {params}; {where})\n  {node.prev}\n  {node.format_node()}\n  {node.next}",
        "this is a bug in ZeroGraph; please report it with this message",
    )
