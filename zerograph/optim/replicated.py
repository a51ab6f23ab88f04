"""Gradients of parameters that ranks hold whole: whether they are the same on all of them.

A weight that tensor parallelism left plain and that computes with a rank's own heads or tokens, as a norm of queries
does, gets a part of its gradient on each rank. A parameter outside of the model, as a weight of losses that the loop
adds up, gets that of this rank's batch. Nothing adds these up, and each rank would train another value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph.core.errors import UnsupportedError
from zerograph.runtime.comm.collectives import of_all_ranks, together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, sequence_of
from zerograph.runtime.joined import other_axis
from zerograph.runtime.torch_private import local_tensor

log = logging.getLogger(__name__)

_TOLERANCE = 0.01
"""Of norms: parts of a gradient differ by more, and the rounding of kernels that are not deterministic by less."""
_NOISE = 1e-6
"""Of the largest norm: gradients that are zero but for rounding, as of a bias before a normalization, are below it."""
_SAME = 1e-4
"""Of norms of gradients that were averaged, which have the same bits: a batch gives each rank others by more."""


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


def warn_of_unaveraged_gradients(
    params: Sequence[Tensor], comm: Communicator | None, optimizer: str, device: torch.device
) -> None:
    """Compare norms of the gradients of ``params``, plain ones that no backend averages, over the ranks of ``comm``,
    and warn where they differ: in a program of its own, which ranks compare, so none waits for those that have none.

    What DistributedDataParallel has averaged passes. Else the joint norm of a clipping, and whether a gradient is
    finite, would differ between ranks too, and replicas of the model's own weights with them, as under that.

    Args:
        device: where ``comm`` communicates from.
    """
    if not params or comm is None or comm.world_size == 1:
        return
    norms = [torch.zeros((), device="cpu") if p.grad is None else p.grad.detach().float().norm().cpu() for p in params]
    name = f"gradients of {len(params)} parameters outside of the model"
    with together(comm, Entry(f"first step of {optimizer}", sequence_of([name]), comm.steps), compared=True):
        found = of_all_ranks(comm, name, torch.stack(norms).double().to(device)).cpu().nan_to_num(math.inf, math.inf)
    most, least = found.max(0).values, found.min(0).values
    noise = _NOISE * float(most.nan_to_num(posinf=0.0).max())
    # Where all are infinite, their difference is none, and passes.
    pairs = zip(least.tolist(), most.tolist(), strict=True)
    different = [high - low > max(low * _SAME, noise) for low, high in pairs]
    if any(different):
        log.warning(
            "%d parameters of this %s are in no model of a backend and have another gradient on each rank, the first "
            "of shape %s: nobody averages them, and with clipping, or where one is not finite, ranks train other "
            "models\n\nhint: compute the loss in the compiled module and let that own them, or average their gradients "
            "over ranks before step() is called; parameters that shall differ by rank want an optimizer of their own",
            sum(different), optimizer, list(params[different.index(True)].shape),
        )  # fmt: skip


def _is_whole(param: Tensor) -> bool:
    if not isinstance(param, DTensor) or not param.requires_grad:
        return False
    return other_axis(param.device_mesh) is not None and param.placements[-1].is_replicate()
