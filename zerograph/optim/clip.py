"""Gradient clipping on local shards: one pass over this rank's memory and one scalar all-reduce."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Generator, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerograph._core as _core
from zerograph.core.arguments import number, require, require_flag
from zerograph.core.errors import UnsupportedError
from zerograph.optim.tensors import is_dense, on_gpu, on_host, pieces, sum_of
from zerograph.runtime.dtensors import group_of_ranks, is_sharded, needs_one_reduction
from zerograph.runtime.executor import late_gradients
from zerograph.runtime.torch_private import local_tensor

log = logging.getLogger(__name__)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of ``parameters`` in place so that their joint norm is at most ``max_norm``.

    Does what ``torch.nn.utils.clip_grad_norm_`` does, on the shards that this rank holds instead of on DTensors one by
    one. All ranks call it together.

    Args:
        parameters: sharded or plain parameters; those without gradient are skipped.
        max_norm: the largest norm allowed.
        norm_type: the p of the norm; ``math.inf`` or ``"inf"`` is the largest absolute value.
        error_if_nonfinite: raise instead of scaling by a norm that is not finite.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        ConfigError: ``parameters`` are no tensors, ``max_norm`` is negative, or ``norm_type`` not positive.
        UnsupportedError: a gradient that is partial over ranks, or sharded over more than one mesh dimension.
    """
    order = order_of_norm(norm_type)
    if not (isinstance(max_norm, Tensor) and max_norm.numel() == 1):  # one on a device is not waited for
        max_norm = number("max_norm", max_norm, "for example 1.0")
        require(max_norm >= 0, f"max_norm={max_norm}: the largest norm allowed cannot be negative", "for example 1.0")
    require_flag("error_if_nonfinite", error_if_nonfinite, "True raises where the norm is not finite")
    params = _tensors(parameters)
    late_gradients.complete(params)
    grads = [p.grad for p in params if p.grad is not None]
    split = [g for g in grads if is_split(g)]
    replicated = [local_tensor(g) for g in grads if not is_split(g)]
    mine = [local_tensor(g) for g in split]
    group = one_group(split)
    norm = _norm_over_ranks(mine, replicated, order, group).to(_precision(mine + replicated))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        )
    # 1e-6, as in torch's: factors are the same to the bit.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    local = mine + replicated
    for places in _by_kind(local):
        alike = [local[i] for i in places]
        torch._foreach_mul_(alike, scale.to(alike[0].device))
    return norm


def order_of_norm(norm_type: float | str) -> float:
    """The p of a norm; torch's functions take "inf" too.

    Raises:
        ConfigError: there is no norm of that order.
    """
    hint = "2 is the Euclidean norm, math.inf the largest absolute value"
    order = math.inf if norm_type == "inf" else number("norm_type", norm_type, hint)
    require(order > 0, f"norm_type={norm_type}: the order of a norm must be positive", hint)
    return order


def _tensors(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor | nn.Module | str)
    params = list(parameters) if several else [parameters]
    other = next((type(p).__name__ for p in params if not isinstance(p, Tensor)), None)
    require(other is None, f"parameters must be tensors, got {other}", "give model.parameters()")
    if isinstance(parameters, Generator) and not params:
        log.warning("zerograph.clip_grad_norm_ got an empty generator, used up perhaps: no gradient is clipped")
    return params  # type: ignore[return-value]


def one_group(split: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """The ranks over which all of ``split`` are split; None where nothing is.

    Raises:
        UnsupportedError: some are split over other ranks than others, so that one reduction would not do.
    """
    groups = {group_of_ranks(tensor) for tensor in split}
    if len(groups) > 1:
        raise UnsupportedError(
            f"tensors are split over {len(groups)} process groups, and their norm is one reduction over one",
            "take the parameters of one mesh at a time",
        )
    return next(iter(groups), None)


def is_split(grad: Tensor) -> bool:
    """Whether ranks hold different parts of ``grad``, so that its norm is summed over them.

    Raises:
        UnsupportedError: one scalar reduction would not do.
    """
    if isinstance(grad, DTensor) and not needs_one_reduction(grad):
        raise UnsupportedError(
            f"cannot take the norm of a tensor placed as {grad.placements}", "use torch.nn.utils.clip_grad_norm_"
        )
    return is_sharded(grad)


def _norm_over_ranks(
    split: list[Tensor], replicated: list[Tensor], p: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Norm of the gradients that are split over ``group`` and the replicated ones, the same on every rank, together.

    Args:
        split: this rank's parts.
        replicated: gradients of which every rank has all.
        p: of the norm.
        group: whose ranks sum up; None if nothing is split.

    Returns:
        A 0-d tensor where the gradients are, of float64 where kernels of ours took the norm.
    """
    # Powers, not norms, add up over ranks.
    powers = []
    if split:
        powers.append(power_sum(split, p))
        op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
        dist.all_reduce(powers[0], op=op, group=group)
    if replicated:
        powers.append(power_sum(replicated, p))
    if not powers:
        return torch.zeros(())
    precision = functools.reduce(torch.promote_types, {power.dtype for power in powers})
    both = torch.stack([power.to(powers[0].device, precision) for power in powers])
    return both.max() if math.isinf(p) else both.sum() ** (1.0 / p)


def power_sum(grads: list[Tensor], p: float) -> Tensor:
    """Sum of ``|g|**p`` over all elements of some ``grads``, or their largest absolute value."""
    if p == 2.0 and on_host(grads):
        dense = [g if is_dense(g) else g.contiguous() for g in grads]
        return torch.tensor(sum_of(_core.squares(pieces(dense))), dtype=torch.float64)
    if p == 2.0 and on_gpu(grads):
        from zerograph.runtime.kernels.sum_of_squares import sum_of_squares  # imports Triton

        return sum_of_squares([g if is_dense(g) else g.contiguous() for g in grads])
    powers = power_sums(grads, p)
    return powers.max() if math.isinf(p) else powers.sum()


def power_sums(tensors: list[Tensor], p: float) -> Tensor:
    """For each tensor by itself, the sum of ``|x|**p`` over its elements, or the largest absolute value."""
    if p == 2.0 and on_host(tensors):
        dense = [t if is_dense(t) else t.contiguous() for t in tensors]
        return torch.tensor([sum_of(_core.squares(pieces([t]))) for t in dense], dtype=torch.float64)
    # In a list: an index of places would have to come from the host.
    found = [torch.zeros((), device=tensors[0].device, dtype=_precision(tensors))] * len(tensors)
    for places in _by_kind(tensors):
        filled = [i for i in places if tensors[i].numel()]
        if filled:
            norms = torch.stack(torch._foreach_norm([tensors[i].reshape(-1) for i in filled], p)).to(found[0])
            for i, norm in zip(filled, norms.unbind(), strict=True):
                found[i] = norm
    norms = torch.stack(found)
    return norms if math.isinf(p) else norms**p


def _precision(grads: list[Tensor]) -> torch.dtype:
    """The dtype of the sums; of all gradients, empty ones too, as ranks add up theirs."""
    return functools.reduce(torch.promote_types, {g.dtype for g in grads}, torch.float32)


def _by_kind(tensors: list[Tensor]) -> list[list[int]]:
    """Places of the tensors of each device and dtype, as foreach kernels need them."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(places.values())
