"""Modules that would compute something else once sharded, or cannot be: reported before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerograph.core.errors import UnsupportedError


def refuse_modules(roots: Sequence[nn.Module], several_ranks: bool) -> None:
    """Look at every module of ``roots`` and its buffers.

    Raises:
        UnsupportedError: naming the first that cannot be trained, and why.
    """
    for root in roots:
        for name, module in root.named_modules():
            which = f"{type(module).__name__} {name or 'at the root'}"
            _refuse_scripted(module, which)
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                _refuse_embedding(module, which)
            for attribute, buffer in module._buffers.items():
                if buffer is not None and several_ranks:
                    _refuse_buffer(buffer, f"{name}.{attribute}".lstrip("."))


def _refuse_scripted(module: nn.Module, which: str) -> None:
    if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
        raise UnsupportedError(
            f"{which} is a ScriptModule: its code reads parameters where they cannot be gathered for it",
            "use the module as it was before torch.jit.script or torch.jit.trace, which torch.compile replaces",
        )


def _refuse_embedding(module: nn.Embedding | nn.EmbeddingBag, which: str) -> None:
    if module.sparse:
        raise UnsupportedError(f"{which} makes sparse gradients, which cannot be reduced", "build it with sparse=False")
    if module.max_norm is not None:
        raise UnsupportedError(
            f"{which} changes its weight in its forward (max_norm={module.max_norm}), which shards do not see",
            "build it without max_norm, and clip rows between steps in "
            "`with zerograph.gathered(module, writeback=True):`",
        )


def _refuse_buffer(buffer: Tensor, name: str) -> None:
    if buffer.layout != torch.strided or buffer.is_quantized or buffer.is_nested:
        kind = "quantized" if buffer.is_quantized else "nested" if buffer.is_nested else str(buffer.layout)
        raise UnsupportedError(
            f"buffer {name} is {kind}, which cannot be sent to the other ranks, who start from rank 0's buffers",
            "make it dense, or keep it as a plain attribute (self.matrix = tensor), which each rank makes for itself",
        )
