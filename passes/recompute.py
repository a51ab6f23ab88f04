"""Say what the backward computes again: tags for the partitioner, which splits the joint graph by them.

Gathered parameters, always: every ``unshard`` marker, and every cheap operator that reads nothing but parameters
(views, casts). The backward then starts from the shard, which is alive anyway, and gathers again; whether that costs a
collective is a matter of residency, decided by the runtime's cache.

Activations, as planned: all of a recomputed layer but what enters and leaves it, as ``torch.utils.checkpoint`` around
the layer would, and but for those that the plan saves by name. In other layers, activations that the plan moves off the
device are saved. A loss in tiles recomputes tensors as large as the logits and saves its results per token.

Safe because operators are pure: random ones either read a seed that is saved, or are replayed by the partitioner with
the state of the generator. Operators that must run once stay out, and so do those that read an input that the forward
overwrites (a counter in a buffer): torch 2.13 reads such inputs again, changed, in its own recomputations too, and
computes wrong gradients; here the first reading is saved, under every plan. Regions of ``torch.utils.checkpoint`` come
with tags of their own, and those win.
"""

from __future__ import annotations

import logging
import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.core.plan import Plan
from zerograph.core.step import layer_of_activation, layers_of
from zerograph.graph.layers import module_of
from zerograph.graph.nodes import COPIES, Activation, backward_nodes, is_size, is_view, readings_of_overwritten
from zerograph.graph.ops import UNSHARD
from zerograph.graph.torch_private import SEEDS, WITH_EFFECTS
from zerograph.tiling.cuts import Mixes
from zerograph.tiling.token_region import head_of, region_of

log = logging.getLogger(__name__)

_ONCE = SEEDS | {WITH_EFFECTS}
"""A second call gives something else than the first, or does something twice."""

# A recomputed node that feeds a checkpointed region of a higher number would be saved by the partitioner.
_LAST_REGION = 1 << 30


def recompute(gm: fx.GraphModule, plan: Plan) -> int:
    """Tag nodes of the joint graph ``gm``; returns how many were tagged. Edits metadata only."""
    before = {n for n in gm.graph.nodes if "recompute" in n.meta}
    _tag_parameters(gm.graph)
    forward = _forward(gm.graph)
    for node in readings_of_overwritten(forward):
        if not is_view(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    if plan.save_others:
        _save_all(forward)
    if plan.recompute:
        _recompute_layers(forward, frozenset(plan.recompute), frozenset(plan.save))
    _save_offloaded(forward, plan)
    if plan.loss_tiles > 1:
        _recompute_loss(forward, plan)
    return sum("recompute" in n.meta for n in gm.graph.nodes if n not in before)


def _tag_parameters(graph: fx.Graph) -> None:
    tagged: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = [n for n in node.all_input_nodes if not is_size(n)]  # sizes are there in the backward too
        derived = bool(inputs) and all(n in tagged for n in inputs)
        if node.target is UNSHARD or (derived and _is_cheap(node)):
            tagged.add(node)
            # Untagged, the unsharded parameter could be saved: the minimum cut counts the bytes that it saves, and does
            # not know that the shard stays alive in any case.
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _LAST_REGION


def _is_cheap(node: fx.Node) -> bool:
    return is_view(node) or node.target in COPIES


def _forward(graph: fx.Graph) -> list[fx.Node]:
    """The forward's operators, but for arithmetic on sizes and what is made of parameters."""
    backward = backward_nodes(graph)
    found = [n for n in graph.nodes if n.op == "call_function" and n not in backward and not is_size(n)]
    return [n for n in found if n.meta.get("ac_graph_id") != _LAST_REGION]


def _save_all(forward: list[fx.Node]) -> None:
    """Save everything that the backward reads, but for views, which cost nothing."""
    for node in forward:
        if "recompute" not in node.meta and not is_view(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _recompute_layers(forward: list[fx.Node], layers: frozenset[str], save: frozenset[str]) -> None:
    """Recompute what is inside of ``layers``; save what enters or leaves them, and the activations ``save``."""
    layer_at = _layers(forward)
    inside = {node: layer for node, layer in layer_at.items() if layer in layers}
    for node in inside:
        if _may_be_repeated(node):  # setdefault: the tags of the user's own checkpoint regions win
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    # Saved at its borders, a layer is computed again from its own input. Else the tags of neighbours would join, and
    # the backward of the last layer would compute all of them again before it could begin.
    for node in forward:
        crosses = any(user in layer_at and inside.get(user) != inside.get(node) for user in node.users)
        if crosses and _is_recomputed(node):
            _save(node)
    named = {node.meta["zg"].name: node for node in reversed(forward) if isinstance(node.meta.get("zg"), Activation)}
    for name in sorted(save & named.keys()):
        if _is_recomputed(named[name]) and "ac_graph_id" not in named[name].meta:
            _save(named[name])
    if missing := sorted(save - named.keys()):
        log.warning("%s, which the plan saves, is not in the graph: it is recomputed", ", ".join(missing))


def _recompute_loss(forward: list[fx.Node], plan: Plan) -> None:
    """Recompute tensors of a loss in tiles that are as large as the logits, and save its results for each token."""
    head = head_of(forward, plan)
    if head is None:
        return
    try:
        region = region_of(head, set(forward).__contains__)
    except Mixes as error:
        # Of another batch's size, or what Inductor's passes made of it.
        tiles = f"{plan.loss_tiles} tiles of the loss were planned"
        log.warning("%s, and logits exist for all tokens at once, because %s", tiles, error)
        return
    for node in region.nodes:
        # A gradient that the forward makes waits for the backward, however large it is beside the logits.
        if node.meta.get("partitioner_tag") == "must_be_in_forward" and "recompute" in node.meta:
            continue
        if region.is_large(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif not is_view(node) and any(map(region.is_large, node.users)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _save_offloaded(forward: list[fx.Node], plan: Plan) -> None:
    """Save the activations that wait off the device, but for those of layers that are recomputed."""
    offloaded = {name for name, _ in plan.offload if layer_of_activation(name) not in plan.recompute}
    for node in forward if offloaded else ():
        fact = node.meta.get("zg")
        if isinstance(fact, Activation) and fact.name in offloaded and node.meta.keys().isdisjoint(_TAGS):
            _save(node)


_TAGS = ("recompute", "ac_graph_id")
"""Metadata of nodes for which the user's own regions, or steps above, have decided already whether they are saved."""


def _layers(forward: list[fx.Node]) -> dict[fx.Node, str]:
    """The layer of each node, as the planner has it."""
    return dict(zip(forward, layers_of([module_of(node) or "" for node in forward]), strict=True))


def _may_be_repeated(node: fx.Node) -> bool:
    if node.target is operator.getitem and not is_view(node):
        return _is_recomputed(node.args[0])  # type: ignore[arg-type]
    # A second call would give the symbol of a size another value.
    binds_a_size = "unbacked_bindings" in node.meta or isinstance(node.meta.get("val"), torch.SymInt)
    return node.target not in _ONCE and not binds_a_size


def _is_recomputed(node: fx.Node) -> bool:
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _save(node: fx.Node) -> None:
    """Save the memory that ``node`` looks at: views cannot be, and of a tuple the parts that are read."""
    while is_view(node) and _is_recomputed(node.args[0]):  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    if is_view(node):
        return  # of what is saved already
    owner: fx.Node = node.args[0] if node.target is operator.getitem else node  # type: ignore[assignment]
    owner.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for part in owner.users:
        if part.target is operator.getitem:
            part.meta.pop("recompute", None)
