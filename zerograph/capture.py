"""A traced graph as a :class:`~zerograph.ir.Step`: what the planner reads."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from zerograph.costs import bytes_of
from zerograph.ir import Kind, Op, Param, Step, Value
from zerograph.ops import REDUCE_GRAD, UNSHARD
from zerograph.passes.graph import Marker, markers
from zerograph.passes.layers import module_of


def capture(graph: fx.Graph, *, training: bool) -> Step:
    """The step that ``graph`` (joint, or inference) performs on this rank.

    Symbolic sizes are counted at the size that was traced.
    """
    nodes = [n for n in graph.nodes if n.op != "output"]
    return Step(
        ops=tuple(_op(n) for n in nodes if n.op == "call_function"),
        values=tuple(_value(n) for n in nodes),
        params=_params(graph),
        training=training,
    )


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


def _op(node: fx.Node) -> Op:
    backward = node.meta.get("partitioner_tag") == "is_backward"
    inputs = node.all_input_nodes
    return Op(
        name=node.name,
        target=str(node.target),
        phase="backward" if backward else "forward",
        reads=tuple(n.name for n in inputs),
        writes=(node.name,),
        params=tuple(str(n.args[2]) for n in inputs if n.target is UNSHARD),
        source=source_line(node),
        module=module_of(node) or "",
    )


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that ``node`` comes from, innermost frame; empty when unknown."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else ""


def _value(node: fx.Node) -> Value:
    return Value(node.name, bytes_of(node.meta.get("val")), _kind(node))


def _kind(node: fx.Node) -> Kind:
    if node.op == "placeholder":
        return "input"
    if node.target is UNSHARD:
        return "gathered"
    return "gradient" if node.target is REDUCE_GRAD else "temporary"
