"""Gradients of parameters that tensor parallelism does not split: whether they are the same on all of its ranks.

A weight that was left plain and computes with a rank's own heads or tokens, as a norm of queries does, gets a part of
its gradient on each rank. Nothing adds these up, and each rank would train another weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph.core.errors import UnsupportedError
from zerograph.runtime.joined import other_axis
from zerograph.runtime.torch_private import local_tensor

_TOLERANCE = 0.01
"""Of norms: parts of a gradient differ by more, and the rounding of kernels that are not deterministic by less."""
_NOISE = 1e-6
"""Of the largest norm: gradients that are zero but for rounding, as of a bias before a normalization, are below it."""


def refuse_different_gradients(params: Iterable[Tensor], names: Mapping[int, str]) -> None:
    """Compare norms of the gradients of ``params`` that are whole along an axis of tensor parallelism, whose ranks call
    this together; does nothing where there is none.

    Raises:
        UnsupportedError: ranks have different ones, on all of them.
    """
    found = [p for p in params if _is_whole(p)]
    if not found:
        return
    axis = other_axis(found[0].device_mesh)  # type: ignore[attr-defined]
    assert axis is not None
    grads = [local_tensor(p.grad) if p.grad is not None else None for p in found]
    norms = torch.stack(
        [torch.zeros((), device="cpu") if g is None else g.detach().float().norm().cpu() for g in grads]
    )
    both = torch.stack([norms, -norms]).to(local_tensor(found[0]).device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=axis.get_group())
    most, least = both[0].cpu(), -both[1].cpu()
    noise = _NOISE * float(most.nan_to_num(0.0, 0.0).max())
    for param, high, low in zip(found, most.tolist(), least.tolist(), strict=True):
        if math.isfinite(high) and high > max(low * (1 + _TOLERANCE), noise):
            raise UnsupportedError(
                f"parameter {names.get(id(param), list(param.shape))} is not split by tensor parallelism, and its "
                f"gradient has a norm of {low:.3g} on one rank of that axis and {high:.3g} on another",
                "it computes with a part of the heads or tokens: parallelize it too, so that its gradient is summed: "
                "SequenceParallel() where tokens are split, SequenceParallel(sequence_dim=2) for norms of split heads",
            )


def _is_whole(param: Tensor) -> bool:
    if not isinstance(param, DTensor) or not param.requires_grad:
        return False
    return other_axis(param.device_mesh) is not None and param.placements[-1].is_replicate()
