"""What FX nodes cost: operations of matrix products, bytes read and written, and memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zerograph.graph.nodes import is_size, is_view
from zerograph.graph.torch_private import OpOverload, behind_generator, is_recomputable


def traced_size(size: int | torch.SymInt) -> int:
    """A size as it was traced; data-dependent sizes have no value and count as 0."""
    return size if isinstance(size, int) else size.node.hint or 0


def bytes_of(val: Any) -> int:
    """Bytes of the tensors in ``val``, each as if it had memory of its own."""
    if isinstance(val, torch.Tensor):
        return traced_size(val.numel()) * val.element_size()
    if isinstance(val, (list, tuple)):
        return sum(map(bytes_of, val))
    return 0


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a product, convolution or attention; 0 for anything else."""
    target, given = behind_generator(node.target, node.args)
    operation = getattr(target, "overloadpacket", None)
    formula = _OF_CPU.get(operation) or flop_registry.get(operation)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((given, node.kwargs), lambda n: n.meta.get("val"))  # type: ignore[arg-type]
    found = formula(*args, **kwargs, out_val=node.meta.get("val"))
    return int(found) if isinstance(found, (int, float)) else traced_size(found)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Two products over all pairs of positions, as torch counts them for other kernels, masked or not."""
    return 2 * _pairs(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> Any:
    """Five products: the scores again, and the gradients of scores, values, queries and keys."""
    return 2 * _pairs(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query: torch.Tensor, key: torch.Tensor) -> Any:
    batch, heads, rows, _ = query.shape
    return batch * heads * rows * key.shape[-2]


# The kernel that dry runs trace, whichever machine they are about; torch counts nothing for it.
_OF_CPU: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def describing_sizes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that do arithmetic on sizes, which come from a tensor's shape or from an input.

    0-d tensors that are made of such sizes count too. A graph of static shapes has constants in their place.
    """
    found: set[fx.Node] = set()
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        val, inputs = node.meta.get("val"), node.all_input_nodes
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            if node.op == "placeholder" or node.target in _OF_SHAPES or found.issuperset(inputs):
                found.add(node)
        elif node.op == "call_function" and isinstance(val, torch.Tensor) and val.dim() == 0:
            if not inputs:
                constants.add(node)
            elif not found.isdisjoint(inputs) and all(n in found or n in constants for n in inputs):
                found.add(node)
    return found | {n for n in constants if n.users and found.issuperset(n.users)}


_OF_SHAPES = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default})


def memory_owner(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` looks at: itself, unless it is a view."""
    while is_view(node) and isinstance(node.args[0], fx.Node) and not _makes_parts(node.args[0]):
        node = node.args[0]
    return node


def moved_bytes(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outs: Sequence[fx.Node]) -> int:
    """Bytes that a compiled segment reads and writes: what never fuses, each by itself; of the rest inputs and outputs.

    What the fused rest reads counts once, however many of its operators read it.
    """
    outer = set(map(memory_owner, inputs))
    fused = [n for n in nodes if not _materializes(n) and not is_view(n)]
    read = {memory_owner(source) for n in fused for source in n.all_input_nodes} & outer
    written = {owner for owner in map(memory_owner, outs) if not _materializes(owner)} - outer
    return sum(bytes_of(n.meta.get("val")) for n in read | written) + sum(map(kernel_bytes, nodes))


def kernel_bytes(node: fx.Node, without: Container[fx.Node] = ()) -> int:
    """Bytes that ``node`` reads and writes where it never fuses with what is around it; else 0.

    Args:
        without: inputs that do not count.
    """
    if not _materializes(node):
        return 0
    inputs = sum(bytes_of(n.meta.get("val")) for n in node.all_input_nodes if n not in without)
    return inputs + bytes_of(node.meta.get("val"))


def is_cheap_to_repeat(node: fx.Node, without: Container[fx.Node] = ()) -> bool:
    """Whether the min-cut partitioner may compute ``node`` again in the backward instead of saving it.

    Its own list of operators says so, and its rule that what is a quarter of its inputs or less is saved. Inputs
    ``without`` do not count.
    """
    if node.target is operator.getitem or is_view(node):
        return True
    if not is_recomputable(node):
        return False
    given = [n for n in node.args if isinstance(n, fx.Node) and n not in without]
    inputs = sum(bytes_of(n.meta.get("val")) for n in given)
    return bytes_of(node.meta.get("val")) * 4 >= inputs


def temporary_bytes(nodes: Sequence[fx.Node], outs: Sequence[fx.Node]) -> int:
    """The most memory that a segment holds of its own at a time, without its inputs and outputs.

    Counts what products and reductions write; what lies between is fused into them, or into its reader.
    """
    kept = {memory_owner(n) for n in outs}
    order = {node: i for i, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            last[memory_owner(source)] = order[node]
    live, most = 0, 0
    dying: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if _materializes(node) and node not in kept:
            size = bytes_of(node.meta.get("val"))
            live += size
            dying[last.get(node, i)] = dying.get(last.get(node, i), 0) + size
        most = max(most, live)
        live -= dying.pop(i, 0)
    return most


def _materializes(node: fx.Node) -> bool:
    if node.op != "call_function" or is_view(node) or is_size(node) or node.target is operator.getitem:
        return False
    target = node.target
    reduces = isinstance(target, OpOverload) and torch.Tag.reduction in getattr(target, "tags", ())
    return reduces or flop_registry.get(getattr(target, "overloadpacket", None)) is not None


def _makes_parts(node: fx.Node) -> bool:
    """Whether ``node`` returns several tensors, each with memory of its own."""
    return isinstance(node.meta.get("val"), (list, tuple)) and not is_view(node)
