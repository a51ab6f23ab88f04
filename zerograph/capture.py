"""A traced graph as a :class:`~zerograph.ir.Step`: what the planner reads."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.costs import bytes_of, flops_of, is_cheap_to_repeat, kernel_bytes, memory_owner
from zerograph.ir import Kind, Op, Param, Step, Value
from zerograph.ops import REDUCE_GRAD, UNSHARD
from zerograph.passes.graph import FACE_AT, Marker, markers, output_of
from zerograph.passes.layers import module_of


def capture(graph: fx.Graph, *, training: bool) -> Step:
    """The step that ``graph`` (joint, or inference) performs on this rank.

    Symbolic sizes are counted at the size that was traced.
    """
    nodes = [n for n in graph.nodes if n.op != "output"]
    backward = backward_nodes(graph)
    return Step(
        ops=tuple(_op(n, n in backward) for n in nodes if n.op == "call_function"),
        values=tuple(_value(n) for n in nodes),
        params=_params(graph),
        training=training,
        outputs=tuple(n.name for n in output_of(graph).all_input_nodes if n not in backward and n.op != "placeholder"),
    )


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What is tagged so, and whatever depends on it."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") == "is_backward" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _params(graph: fx.Graph) -> tuple[Param, ...]:
    reduced = {m.name: m for m in markers(graph, REDUCE_GRAD)}
    read = {m.name: m for m in markers(graph, UNSHARD)}
    params = [_param(m, m.node.args[1], m.source.meta["val"].dtype, name in reduced) for name, m in read.items()]
    # Parameters of which nothing but the shape is read have a gradient all the same.
    unread = [m for name, m in reduced.items() if name not in read]
    return (*params, *(_param(m, m.source.meta["val"].shape, m.node.args[2], True) for m in unread))


def _param(marker: Marker, shape: Any, dtype: Any, trainable: bool) -> Param:
    return Param(
        name=marker.name,
        shape=tuple(shape),
        dtype=dtype_name(dtype),
        compute_dtype=dtype_name(marker.dtype),
        reduce_dtype=dtype_name(marker.reduce_dtype),
        trainable=trainable,
        sharded=marker.sharded,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _op(node: fx.Node, backward: bool) -> Op:
    inputs = node.all_input_nodes
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
        moved=kernel_bytes(node),
        cheap=is_cheap_to_repeat(node),
        again=node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE),
    )


def _params_of(node: fx.Node) -> tuple[str, ...]:
    if node.target in (UNSHARD, REDUCE_GRAD):
        return (str(node.args[FACE_AT[node.target]]),)
    return tuple(str(n.args[2]) for n in node.all_input_nodes if n.target is UNSHARD)


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that ``node`` comes from, innermost frame; empty when unknown."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else ""


def _value(node: fx.Node) -> Value:
    owner, val = memory_owner(node), node.meta.get("val")
    size = bytes_of(val) if isinstance(val, torch.Tensor) else 0  # the parts of a tuple are values of their own
    return Value(node.name, size, _kind(node), "" if owner is node else owner.name)


def _kind(node: fx.Node) -> Kind:
    if node.op == "placeholder":
        return "input"
    if node.target is UNSHARD:
        return "gathered"
    return "gradient" if node.target is REDUCE_GRAD else "temporary"
