"""Leave one marker per parameter and one reduction per gradient.

A parameter that is read several times (tied weights, two uses) leaves several ``unshard`` markers on one shard, and
several ``reduce_grad`` markers whose results are added. This pass merges the former and moves the addition before the
latter, so that each parameter is gathered together with its bucket and reduced once. Safe because ``unshard`` is pure
and the mean over ranks is linear. Gathered parameters that the graph returns are cloned: the runtime frees the rest.

Tensors that are stacked are joined along a dimension of their own, as the user wrote it: torch joins them along one of
theirs and then views that as two, which would take the samples of a batch for one dimension with what is stacked.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import (
    Marker,
    behind_identity,
    call,
    computed,
    expressions_of,
    is_identity_view,
    markers,
    protect_outputs,
)
from zerograph.graph.ops import REDUCE_GRAD, UNSHARD

aten = torch.ops.aten


def canonicalize(gm: fx.GraphModule, plan: Plan | None = None) -> int:
    """Rewrite the joint (or inference) graph ``gm`` in place; returns the number of markers removed. Reads no plan."""
    before = _count(gm.graph)
    _merge_unshards(gm.graph)
    _merge_reductions(gm.graph)
    _stack_along_own_dimension(gm.graph)
    protect_outputs(gm.graph)
    gm.graph.eliminate_dead_code()
    return before - _count(gm.graph)


def _count(graph: fx.Graph) -> int:
    return len(markers(graph, UNSHARD)) + len(markers(graph, REDUCE_GRAD))


def _stack_along_own_dimension(graph: fx.Graph) -> None:
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        cat = view.args[0]
        if cat.target is not aten.cat.default or len(cat.users) > 1:
            continue
        parts, dim = cat.args[0], (cat.args[1] if len(cat.args) > 1 else 0)
        shape, *others = (expressions_of(part.meta["val"].shape) for part in parts)
        dim %= len(shape)
        alike = all(other == shape for other in others)
        if alike and expressions_of(view.meta["val"].shape) == [*shape[:dim], len(parts), *shape[dim:]]:
            with graph.inserting_before(view):
                apart = [computed(graph, aten.unsqueeze.default, (part, dim), view) for part in parts]
                stacked = computed(graph, aten.cat.default, (apart, dim), view)
            view.replace_all_uses_with(stacked)
            graph.erase_node(view)
            graph.erase_node(cat)


def _merge_unshards(graph: fx.Graph) -> None:
    first: dict[fx.Node, fx.Node] = {}
    for marker in markers(graph, UNSHARD):
        shard = behind_identity(marker.source)
        kept = first.setdefault(shard, marker.node)
        if kept is marker.node:
            marker.node.update_arg(0, shard)
        else:
            marker.node.replace_all_uses_with(kept)
            graph.erase_node(marker.node)


def _merge_reductions(graph: fx.Graph) -> None:
    by_name: dict[str, list[Marker]] = {}
    for marker in markers(graph, REDUCE_GRAD):
        by_name.setdefault(marker.name, []).append(marker)
    for group in by_name.values():
        total = _sum_of({m.node for m in group})
        if total is not None:
            _reduce_the_sum(graph, group, total)


def _sum_of(reduced: set[fx.Node]) -> fx.Node | None:
    """The node that adds up all of ``reduced``, each once and nothing else, through identity views, if any."""
    terms, changed = set(reduced), True
    while changed:
        changed = False
        for term in list(terms):
            user = next(iter(term.users)) if len(term.users) == 1 else None
            if user is None or term not in terms:
                continue
            if is_identity_view(user):
                merged = {term}
            elif user.target is aten.add.Tensor and not user.kwargs and len(terms & set(user.all_input_nodes)) == 2:
                merged = set(user.all_input_nodes)
            else:
                continue
            # Where somebody else reads a term too, the sum cannot stand for it.
            if all(len(n.users) == 1 for n in merged):
                terms = terms - merged | {user}
                changed = True
    return terms.pop() if len(terms) == 1 else None


def _reduce_the_sum(graph: fx.Graph, group: list[Marker], total: fx.Node) -> None:
    last = group[-1].node
    with graph.inserting_before(last):
        grad = group[0].source
        for marker in group[1:]:
            # Fake tensors: this finds the sum's dtype and strides, and computes nothing.
            value = grad.meta["val"] + marker.source.meta["val"]
            grad = call(graph, aten.add.Tensor, (grad, marker.source), value, last)
        merged = call(graph, REDUCE_GRAD, (grad, *last.args[1:]), last.meta["val"], last)
    total.replace_all_uses_with(merged)
