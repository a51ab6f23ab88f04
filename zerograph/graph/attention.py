"""Kernels of attention, and which operators draw random numbers: torch says that every attention does."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zerograph.graph.nodes import aten
from zerograph.graph.torch_private import RANDOM, OpOverload, behind_generator, named_arguments

ATTENTION_BACKWARD = frozenset({
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
})  # fmt: skip
ATTENTION = ATTENTION_BACKWARD | {
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip
"""Kernels of attention, and of its gradients: each makes several tensors."""


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers, or is one of several results of what does; attention does with dropout
    only."""
    if node.target is operator.getitem:
        return is_random(node.args[0])  # type: ignore[arg-type]
    target, args = behind_generator(node.target, node.args)
    if not isinstance(target, OpOverload):
        return False
    if target in ATTENTION:
        return bool(named_arguments(target, args, node.kwargs).get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in target.tags or target in RANDOM
