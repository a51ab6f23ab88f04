"""Costs of FX nodes: operations of matrix products, bytes read and written, and memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zerograph.core.segment_profile import Operator, SegmentProfile, segment_profile
from zerograph.graph.attention import ATTENTION
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
    formula = _formula_of(target)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((given, node.kwargs), lambda n: n.meta.get("val"))  # type: ignore[arg-type]
    found = formula(*args, **kwargs, out_val=node.meta.get("val"))
    return int(found) if isinstance(found, (int, float)) else traced_size(found)


def attention_flops(node: fx.Node) -> int:
    """Of :func:`flops_of`, those of attention that is one kernel."""
    target, _ = behind_generator(node.target, node.args)
    return flops_of(node) if target in ATTENTION else 0


def _formula_of(target: Any) -> Callable[..., Any] | None:
    if not isinstance(target, OpOverload):
        return None
    operation = target.overloadpacket
    return _OF_CPU.get(operation) or _GROUPED.get(target.name()) or flop_registry.get(operation)


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> Any:
    """A product of each row with the weight of its group (expert)."""
    return 2 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]


def _grouped_backward(rows: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> Any:
    return 2 * _grouped(rows, weights)


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


# torch counts nothing for these either. By name: transformers registers its operators when a model needs them.
_GROUPED: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
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


def moved_bytes(nodes: Sequence[fx.Node], outs: Sequence[fx.Node]) -> int:
    """Bytes that a compiled segment reads and writes: what never fuses, each by itself; of the rest inputs and outputs.

    Inputs of the fused rest are those of the segment and results of kernels inside of it; outputs are what leaves the
    segment and what a product inside of it reads. Memory that it reads counts once, however many of its operators read
    it.
    """
    fused = {n for n in nodes if not _is_materialized(n) and not is_view(n)}
    read = {memory_owner(source) for n in fused for source in n.all_input_nodes}
    given = {memory_owner(source) for n in nodes if flops_of(n) for source in n.all_input_nodes}
    written = (set(map(memory_owner, outs)) | given) & fused
    sizes = (bytes_of(n.meta.get("val")) for found in (read - fused, written) for n in found)
    return sum(sizes) + sum(map(kernel_bytes, nodes))


def kernel_bytes(node: fx.Node, without: Container[fx.Node] = ()) -> int:
    """Bytes that ``node`` reads and writes where it never fuses with what is around it; else 0.

    Args:
        without: inputs that do not count.
    """
    if not _materializes(node):
        return 0
    inputs = sum(bytes_of(n.meta.get("val")) for n in node.all_input_nodes if n not in without)
    times = _LAID_OUT if getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS else 1
    return times * (inputs + bytes_of(node.meta.get("val")))


def packed_bytes(node: fx.Node) -> int:
    """Bytes of the matrices that ``node`` multiplies; 0 where it is no product of matrices."""
    factors: list[Any] = [node.args[i] for i in _FACTORS.get(getattr(node.target, "overloadpacket", None), ())]
    return bytes_of([factor.meta.get("val") for factor in factors])


_FACTORS: Mapping[Any, tuple[int, ...]] = {
    torch.ops.aten.mm: (0, 1),
    torch.ops.aten.bmm: (0, 1),
    torch.ops.aten.addmm: (1, 2),
    torch.ops.aten.baddbmm: (1, 2),
}
"""The positions of the two matrices of a product. Matrices that attention multiplies stay in the cache."""

_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)
_LAID_OUT = 3
"""Times that a convolution touches each byte: libraries lay images and weights out in blocks of channels first (oneDNN
on CPUs, NHWC in cuDNN), so that each is read and written once more than by the convolution itself."""


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


def memory_inside(nodes: Sequence[fx.Node], outs: Sequence[fx.Node], given: Sequence[fx.Node] = ()) -> SegmentProfile:
    """The memory that a compiled segment holds while it runs; last uses of ``given`` inputs are by position."""
    operators = [_operator(node) for node in nodes if not is_view(node) and not is_size(node)]
    found = segment_profile(operators, {memory_owner(node) for node in outs})
    until: dict[Hashable, int] = {
        at: found.until[owner] for at, node in enumerate(given) if (owner := memory_owner(node)) in found.until
    }
    return replace(found, until=until)


def _operator(node: fx.Node) -> Operator:
    val = node.meta.get("val")
    size = bytes_of(val) if isinstance(val, torch.Tensor) else 0  # parts of a tuple are nodes of their own
    return Operator(
        node, list(map(memory_owner, node.all_input_nodes)), size, _is_materialized(node), flops_of(node) > 0
    )


def _materializes(node: fx.Node) -> bool:
    if node.op != "call_function" or is_view(node) or is_size(node) or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    fuses = target.namespace in _KNOWN and torch.Tag.reduction not in target.tags
    return not fuses or target.overloadpacket in _SCATTERS or flop_registry.get(target.overloadpacket) is not None


_KNOWN = ("aten", "prims", "zg")
"""Operators that Inductor may fuse, and ours, which are instructions; of others it knows nothing but the call."""
_SCATTERS = (
    torch.ops.aten._unsafe_masked_index_put_accumulate,
    torch.ops.aten._unsafe_index_put,
    torch.ops.aten.index_put,
    torch.ops.aten.scatter,
    torch.ops.aten.scatter_add,
    torch.ops.aten.scatter_reduce,
)
"""They write into a copy of their first argument, which is there whole for them: gradients of embeddings."""


def _is_materialized(node: fx.Node) -> bool:
    """Whether a kernel of its own writes ``node``, alone or as one of several results."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and _materializes(source)


def _makes_parts(node: fx.Node) -> bool:
    """Whether ``node`` returns several tensors, each with memory of its own."""
    return isinstance(node.meta.get("val"), (list, tuple)) and not is_view(node)
