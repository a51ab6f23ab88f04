"""A traced graph as a :class:`~zerograph.core.step.Step`: what the planner reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.compiler.source_lines import source_line
from zerograph.compiler.tileable import (
    batch_regions,
    bytes_of_node,
    gradients_ahead,
    token_regions,
    why_logits_are_untiled,
)
from zerograph.core.config import CutBy
from zerograph.core.step import Kind, Lookup, Op, Param, Step, Value
from zerograph.core.wire import Wires
from zerograph.graph.costs import (
    attention_flops,
    describing_sizes,
    flops_of,
    is_cheap_to_repeat,
    kernel_bytes,
    memory_owner,
    packed_bytes,
    traced_size,
)
from zerograph.graph.layers import module_of
from zerograph.graph.lookups import last_of_range
from zerograph.graph.nodes import SPEC_AT, Activation, Marker, backward_nodes, left_as_it_is, markers, output_of
from zerograph.graph.ops import REDUCE_GRAD, UNSHARD
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import head_of
from zerograph.runtime.comm.axes import param_on
from zerograph.tiling.products import tilable


def capture(
    graph: fx.Graph,
    *,
    training: bool,
    world_size: int = 1,
    tied: Mapping[str, tuple[str, ...]] | None = None,
    ends_at_break: bool = False,
    cut_by: tuple[CutBy, ...] = (),
    wires: Wires = Wires(),  # noqa: B008  immutable
) -> Step:
    """The step that ``graph`` (joint, or inference) performs on this rank.

    Symbolic sizes are counted at the size that was traced.

    Args:
        training: whether a backward follows the forward.
        ends_at_break: whether the user's code goes on behind a graph break.
        world_size, tied, cut_by, wires: see :class:`~zerograph.compiler.compilation.Compilation`.
    """
    part, backward = _StepNodes(graph), backward_nodes(graph)
    returned = part.behind(n for n in output_of(graph).all_input_nodes if n not in backward)
    step = Step(
        ops=tuple(_op(n, n in backward, part) for n in part.ops),
        values=tuple(_value(n, part) for n in part.nodes),
        params=tuple(replace(wires.of(p), tied_to=(tied or {}).get(p.name, ())) for p in _params(graph, world_size)),
        training=training,
        outputs=tuple(n.name for n in returned if n.op != "placeholder"),
        lookups=tuple(_lookups(graph)),
        tilable=tuple(tilable(graph)),
        ends_at_break=ends_at_break,
    )
    full = Graph(step)
    head = head_of(full)
    if head is not None:
        product = next(node for node in graph.nodes if node.name == head.name)
        why, ahead = why_logits_are_untiled(product, backward), gradients_ahead(graph, product)
        step = replace(step, untiled_logits=why, loss_gradients=() if why else ahead)
    if training and cut_by:
        params_read = {op.name: read for op, read in zip(full.ops, full.params_read, strict=True)}
        regions = list(token_regions(part.ops, backward, params_read)) if "token" in cut_by else []
        whole: dict[str, str] = {}
        if "sample" in cut_by:
            by_sample, whole = batch_regions(part.ops, backward, params_read)
            regions += by_sample
        step = replace(step, token_regions=tuple(regions), whole_batches=tuple(whole.items()))
    return step


def _lookups(graph: fx.Graph) -> Iterator[Lookup]:
    """Tables that are read by position."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        last, table = last_of_range(node.args[1]), node.args[0].meta["val"]
        if last is not None:
            yield Lookup(last, traced_size(table.shape[0]), source_line(node))


class _StepNodes:
    """The nodes of a graph that make the step: tensors, and the operations on them.

    Left out are arithmetic on sizes and operators that leave a whole tensor as it is. A graph of dynamic shapes has
    both, the same graph with fixed shapes has neither, and both must become the same step.

    Attributes:
        sizes: the nodes that compute sizes.
        nodes: inputs and operations, in order.
        ops: the operations among them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.sizes = describing_sizes(graph)
        self._same: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            source = left_as_it_is(node)
            if source is not None:
                # Nodes are visited in order, so that a chain of such views already ends at its first source.
                self._same[node] = self._same.get(source, source)
        self.nodes = [n for n in graph.nodes if n.op != "output" and n not in self.sizes and not self._is_left_out(n)]
        self.ops = [n for n in self.nodes if n.op == "call_function"]

    def _is_left_out(self, node: fx.Node) -> bool:
        """Whether ``node`` leaves a tensor as it is, or only makes what is then written over."""
        if node in self._same or node.op != "call_function" or not node.users or self.behind(node.all_input_nodes):
            return node in self._same
        # The base of a scatter that writes all of it: nobody reads what is in it.
        return all(user.args[0] is node and left_as_it_is(user) not in (None, node) for user in node.users)

    def behind(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """``nodes`` as far as they are data, each once, and what they look at instead of views of all of it."""
        return list(dict.fromkeys(self._same.get(n, n) for n in nodes if n not in self.sizes))

    def owner(self, node: fx.Node) -> fx.Node:
        """The node whose memory ``node`` looks at."""
        while (owner := memory_owner(node)) in self._same:
            node = self._same[owner]
        return owner


def _params(graph: fx.Graph, ranks: int) -> tuple[Param, ...]:
    reduced = {m.name: m for m in markers(graph, REDUCE_GRAD)}
    read = {m.name: m for m in markers(graph, UNSHARD)}
    params = [_param(m, ranks, m.node.args[1], m.source.meta["val"].dtype, name in reduced) for name, m in read.items()]
    # Parameters of which nothing but the shape is read have a gradient all the same.
    unread = [m for name, m in reduced.items() if name not in read]
    return (*params, *(_param(m, ranks, m.source.meta["val"].shape, m.node.args[2], True) for m in unread))


def _param(marker: Marker, ranks: int, shape: Any, dtype: Any, trainable: bool) -> Param:
    dtypes = dtype, marker.dtype, marker.reduce_dtype
    return param_on(marker.group, ranks, marker.name, shape, dtypes, sharded=marker.sharded, trainable=trainable)


def _op(node: fx.Node, backward: bool, part: _StepNodes) -> Op:
    inputs = part.behind(node.all_input_nodes)
    return Op(
        name=node.name,
        target=str(node.target),
        phase="backward" if backward else "forward",
        reads=tuple(n.name for n in inputs),
        writes=(node.name,),
        params=_params_of(node),
        source=source_line(node),
        module=module_of(node) or "",
        flops=flops_of(node),
        moved=kernel_bytes(node, without=part.sizes),
        cheap=is_cheap_to_repeat(node, without=part.sizes),
        # The user's own torch.utils.checkpoint regions carry these tags: their operators run again whatever is planned.
        again=node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE),
        activation=fact.name if isinstance(fact := node.meta.get("zg"), Activation) else "",
        packed=packed_bytes(node),
        attention=attention_flops(node),
    )


def _params_of(node: fx.Node) -> tuple[str, ...]:
    if node.target in (UNSHARD, REDUCE_GRAD):
        # A marker names its parameter itself; any other operator reads parameters through the markers among its inputs.
        return (str(node.args[SPEC_AT[node.target]]),)
    return tuple(str(n.args[2]) for n in node.all_input_nodes if n.target is UNSHARD)


def _value(node: fx.Node, part: _StepNodes) -> Value:
    owner = part.owner(node)
    return Value(node.name, bytes_of_node(node), _kind(node), "" if owner is node else owner.name)


def _kind(node: fx.Node) -> Kind:
    if node.op == "placeholder":
        return "input"
    if node.target is UNSHARD:
        return "gathered"
    return "gradient" if node.target is REDUCE_GRAD else "temporary"
