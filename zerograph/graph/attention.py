"""Kernels of attention, and which operators draw random numbers: torch says that every attention does."""

from __future__ import annotations

import torch
from torch import fx

from zerograph.graph.nodes import aten
from zerograph.graph.torch_private import RANDOM, OpOverload, place_of_argument

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
    """Whether ``node`` draws random numbers; attention does with dropout only."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in ATTENTION:
        at = place_of_argument(node.target, "dropout_p")
        return bool(node.args[at] if len(node.args) > at else node.kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in node.target.tags or node.target in RANDOM
