"""Modules that would compute something else once sharded, or cannot be: reported before anything is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zerograph.core.errors import ShardingError, UnsupportedError


def refuse_lazy(roots: Sequence[nn.Module]) -> None:
    """Raises:
    ShardingError: a module of ``roots`` learns the shapes of what it holds from its first batch, which is to come.
    """
    for root in roots:
        for name, module in root.named_modules():
            if any(is_lazy(held) for held in (*module._parameters.values(), *module._buffers.values())):
                raise ShardingError(
                    f"{type(module).__name__} {name or 'at the root'} has no shapes before its first batch",
                    "call the model once with a batch before you compile or shard it",
                )


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
        _refuse_shared_memory(root)


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


def _refuse_shared_memory(root: nn.Module) -> None:
    """Shards have memory of their own: an update of one of two parameters would no longer reach the other."""
    together = defaultdict[tuple[int, torch.dtype], list[tuple[str, Tensor]]](list)
    for name, held in (*root.named_parameters(), *root.named_buffers()):
        if type(held.data) is Tensor and held.layout == torch.strided and held.numel():
            together[held.untyped_storage()._cdata, held.dtype].append((name, held))
    for in_one_storage in together.values():
        before: list[tuple[str, Tensor]] = []
        for name, held in sorted(in_one_storage, key=lambda each: each[1].storage_offset()):
            before = [each for each in before if _end(each[1]) > held.storage_offset()]
            for other, tensor in before:
                if (tensor.requires_grad or held.requires_grad) and _overlap(tensor, held):
                    raise UnsupportedError(
                        f"{other} and {name} are two tensors that share memory: an update of one changes the other, "
                        "which shards, with memory of their own, would not",
                        "tie them by assigning one parameter (head.weight = embed.weight, not .data), or copy one",
                    )
            before.append((name, held))


def _overlap(tensor: Tensor, later: Tensor) -> bool:
    """Whether an element of their storage belongs to both; ``later`` begins no earlier."""
    begin = tensor.storage_offset()
    # Marked one by one: columns of one matrix lie between each other without an element in common.
    marks = torch.zeros(max(_end(tensor), _end(later)) - begin, dtype=torch.bool, device="cpu")
    marks.as_strided(tensor.shape, tensor.stride(), 0).fill_(True)
    return bool(marks.as_strided(later.shape, later.stride(), later.storage_offset() - begin).any())


def _end(tensor: Tensor) -> int:
    """The place in its storage behind the last element of ``tensor``, in elements."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach + 1
