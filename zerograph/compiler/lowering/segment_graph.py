"""A segment as a list of nodes of the whole graph, before it becomes a module of its own.

Most segments of a deep model are equal to one that is compiled already. For those only the structure is hashed, which
takes a fifth of the time of copying their nodes into a graph of their own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from zerograph.compiler.torch_private import lazily_coded
from zerograph.graph.descent import descend
from zerograph.graph.nodes import is_size  # arithmetic that every segment which needs it repeats


@dataclass(frozen=True, slots=True)
class Body:
    """The computation of a segment.

    Attributes:
        gm: the graph that it is a part of.
        inputs: nodes from outside, in order.
        nodes: those inside, and constants and sizes that they need, in the order in which they run.
        outs: what later segments read.
    """

    gm: fx.GraphModule
    inputs: list[fx.Node]
    nodes: list[fx.Node]
    outs: list[Any]

    def module(self) -> fx.GraphModule:
        """The segment as a module of its own."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for i, source in enumerate(self.inputs):
            copies[source] = graph.placeholder(f"arg{i}")
            copies[source].meta["val"] = source.meta["val"]
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        out = graph.output(tuple(copies[n] if isinstance(n, fx.Node) else n for n in self.outs))
        out.meta["user_visible_output_idxs"] = list(range(len(self.outs)))  # later segments rely on the strides traced
        return lazily_coded({str(n.target): attribute(self.gm, str(n.target)) for n in self._constants()}, graph)

    def digest(self) -> str:
        """Structural hash: equal for segments that differ only in which tensors they read."""
        index = {node: i for i, node in enumerate([*self.inputs, *self.nodes])}

        def place(node: fx.Node) -> str:
            return f"%{index[node]}"

        # By position, never by name: names count up from layer to layer.
        text = [f"placeholder   {((), {})} {_layout(node.meta['val'])}" for node in self.inputs]
        for node in self.nodes:
            # Constants are told apart by identity: those of two layers may hold different values.
            identity = id(attribute(self.gm, str(node.target))) if node.op == "get_attr" else ""
            args = fx.node.map_arg((node.args, node.kwargs), place)  # type: ignore[arg-type]
            text.append(f"{node.op} {node.target} {identity} {args} {_layout(node.meta.get('val'))}")
        text.append(f"output   {((fx.node.map_arg(tuple(self.outs), place),), {})} ")  # type: ignore[arg-type]
        # What was compiled for symbolic sizes holds under the guards of the frame that they belong to.
        text += [str(id(env)) for env in self._shape_envs()]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def known_by_identity(self) -> list[Any]:
        """The objects that the digest tells apart by identity: to be kept alive for as long as it is known."""
        return [attribute(self.gm, str(n.target)) for n in self._constants()] + self._shape_envs()

    def _constants(self) -> list[fx.Node]:
        return [n for n in self.nodes if n.op == "get_attr"]

    def _shape_envs(self) -> list[Any]:
        """The owner of the symbolic numbers; empty when all are known."""
        numbers = (number for node in self.inputs for number in _symbolic(node.meta.get("val")))
        return [number.node.shape_env for number in itertools.islice(filter(free_symbols, numbers), 1)]


def body_of(gm: fx.GraphModule, nodes: list[fx.Node], outs: list[Any], symbols: dict[Any, fx.Node]) -> Body:
    """The segment of ``nodes``, which stand in order.

    Args:
        symbols: the placeholder that carries each symbolic size.
    """
    inputs = _inputs_of(nodes, symbols)
    order = dict.fromkeys(inputs)

    def visit(node: fx.Node) -> Iterator[tuple[fx.Node]]:
        if node not in order:
            for source in node.all_input_nodes:
                yield (source,)
            order[node] = None

    for node in nodes:
        descend(visit, node)
    return Body(gm, inputs, list(order)[len(inputs) :], outs)


def _inputs_of(nodes: list[fx.Node], symbols: dict[Any, fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    needed: set[Any] = set()
    queue = list(reversed(nodes))
    seen: set[fx.Node] = set()
    while queue:
        node = queue.pop()
        needed |= symbols_in(node.meta.get("val"))
        for source in node.all_input_nodes:
            needed |= symbols_in(source.meta.get("val"))
            # A constant becomes an attribute of the segment's own module.
            if source in inside or source in seen or source.op == "get_attr":
                continue
            seen.add(source)
            if is_size(source) and source.op != "placeholder":
                # A size that is computed: the segment computes it again, and needs what that starts from.
                queue.append(source)
            else:
                inputs[source] = None
    # Inductor derives sizes from symbols, so each that occurs in a shape must come in, whether a node reads it or not.
    for symbol in sorted(needed & symbols.keys(), key=str):
        inputs[symbols[symbol]] = None
    return list(inputs)


def attribute(gm: fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


def symbols_in(val: Any) -> set[Any]:
    """The symbols in ``val``: in a tensor's sizes, strides and storage offset alike."""
    return set().union(*map(free_symbols, _symbolic(val)))


def _symbolic(val: Any) -> list[Any]:
    """The numbers of ``val`` that are not known while compiling."""
    if isinstance(val, (list, tuple)):
        return [number for v in val for number in _symbolic(v)]
    numbers: tuple[Any, ...] = (val,)
    if isinstance(val, torch.Tensor):
        numbers = (*val.shape, *val.stride(), val.storage_offset()) if val.layout is torch.strided else val.shape
    return [n for n in numbers if isinstance(n, _SYMBOLIC)]


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _layout(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        offset = val.storage_offset()
        # Kernels may rely on 16 aligned bytes; how far a symbolic offset is known to be aligned, its expression tells.
        aligned = offset * val.element_size() % 16 == 0 if isinstance(offset, int) else offset
        return f"{val.dtype} {tuple(val.shape)} {val.stride()} {val.device} {aligned}"
    if isinstance(val, (list, tuple)):
        return " ".join(_layout(v) for v in val)
    return str(val) if isinstance(val, _SYMBOLIC) else ""
