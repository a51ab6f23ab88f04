"""A rank's message to a collective: shards padded to one length, or gradients cut into one row for each rank; and the
means of what a reduction has summed.

On a GPU with Triton one launch casts, pads and packs all tensors of one dtype, and one divides and casts all sums;
elsewhere torch does. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime import kernels
from zerograph.runtime.buffers import ALIGNMENT, torch_dtype


def padded_shards(params: Sequence[Param], shards: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each shard in the compute dtype, as long as every rank's, flat; itself where it is that already.

    Args:
        params: whose shards they are.
        shards: this rank's rows, maybe none, on ``device`` or on the host.
        device: of the collective.
    """
    sends: list[Tensor | None] = [None] * len(params)
    kinds: dict[torch.dtype, list[int]] = {}
    for i, (param, shard) in enumerate(zip(params, shards, strict=True)):
        dtype, length = torch_dtype(param.compute_dtype), param.chunk_elements
        here = shard.device.type == device.type
        if here and shard.dtype == dtype and shard.numel() == length and shard.is_contiguous():
            sends[i] = shard.detach().view(-1)
        elif here and shard.is_contiguous() and _packs(device, shard.dtype, dtype):
            kinds.setdefault(dtype, []).append(i)
        else:
            sends[i] = torch.zeros(length, dtype=dtype, device=device)
            # Of columns a strided copy: they are packed as they are written into the message.
            sends[i][: shard.numel()].view(shard.shape).copy_(shard.detach())  # type: ignore[index]
    for dtype, members in kinds.items():
        lengths = [params[i].chunk_elements for i in members]
        offsets, width = _aligned(lengths, ALIGNMENT // dtype.itemsize)
        message = torch.empty(1, width, dtype=dtype, device=device)
        _pack([shards[i].detach().reshape(-1) for i in members], lengths, offsets, message)
        for i, offset, length in zip(members, offsets, lengths, strict=True):
            sends[i] = message[0, offset : offset + length]
    return [send for send in sends if send is not None]


def gradient_message(
    params: Sequence[Param], grads: Sequence[Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Full gradients as the message of a reduce-scatter, or of an all-reduce.

    Args:
        params: all sharded, or none.
        grads: of each, full.
        dtype: in which they are summed.
        device: of the collective.

    Returns:
        ``[ranks, elements]``: for each rank its rows of one gradient behind those of another, with zeros where it
        has fewer than other ranks. Of parameters that are not sharded ``[1, elements]``.
    """
    (ranks,) = {p.home.ranks if p.sharded else 1 for p in params}
    lengths = [p.chunk_elements for p in params]
    offsets, width = _aligned(lengths, 1)
    if all(_packs(device, grad.dtype, dtype) and grad.device.type == device.type for grad in grads):
        message = torch.empty(ranks, width, dtype=dtype, device=device)
        _pack([grad.detach().reshape(-1) for grad in grads], lengths, offsets, message)
        return message
    if ranks == 1:
        return torch.cat([grad.reshape(-1).to(device, dtype) for grad in grads]).unsqueeze(0)
    message = torch.zeros(ranks, width, dtype=dtype, device=device)
    for length, grad, offset in zip(lengths, grads, offsets, strict=True):
        # Ranks have equal parts, but for the last one that has any.
        flat = grad.reshape(-1)
        equal = len(flat) // max(1, length)
        rest = flat[equal * length :]
        message[:equal, offset : offset + length] = flat[: equal * length].view(equal, length)
        if len(rest):
            message[equal, offset : offset + len(rest)] = rest
    return message


def means(sums: Sequence[Tensor], ranks: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Each of ``sums`` divided by the number of ``ranks``, cast to its dtype of ``dtypes``, in memory of its own: a
    view would keep the whole message alive.

    Args:
        sums: flat, of one device; each quotient is first rounded to its dtype.
        ranks: that have summed them.
        dtypes: of the means.
    """
    if not sums:
        return []
    if all(_packs(total.device, total.dtype, dtype) for total, dtype in zip(sums, dtypes, strict=True)):
        found = [torch.empty_like(total, dtype=dtype) for total, dtype in zip(sums, dtypes, strict=True)]
        _divide(sums, ranks, found)
        return found
    # A device works on a list in a launch or two, where one by one each gradient takes one.
    quotients = list(torch._foreach_div(list(sums), ranks))
    if all(total.dtype == dtype for total, dtype in zip(quotients, dtypes, strict=True)):
        return quotients
    found = [torch.empty_like(total, dtype=dtype) for total, dtype in zip(quotients, dtypes, strict=True)]
    torch._foreach_copy_(found, quotients)
    return found


def _packs(device: torch.device, *dtypes: torch.dtype) -> bool:
    return kernels.available(device) and all(dtype in kernels.DTYPES for dtype in dtypes)


def _aligned(lengths: Sequence[int], multiple: int) -> tuple[list[int], int]:
    """Where each begins, at a ``multiple``, and where the last one ends."""
    offsets, end = [], 0
    for length in lengths:
        offsets.append(end)
        end += -(-length // multiple) * multiple
    return offsets, end


def _pack(tensors: Sequence[Tensor], lengths: Sequence[int], offsets: Sequence[int], message: Tensor) -> None:
    from zerograph.runtime.kernels import messages  # imports Triton

    messages.pack(tensors, lengths, offsets, message)


def _divide(sums: Sequence[Tensor], number: int, outs: Sequence[Tensor]) -> None:
    from zerograph.runtime.kernels import messages

    messages.divide(sums, number, outs)
