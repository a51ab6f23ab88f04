"""Gradient clipping on local shards: one pass over this rank's memory and one scalar all-reduce."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerograph._core as _core
from zerograph.core.arguments import number, require, require_flag
from zerograph.core.errors import UnsupportedError
from zerograph.optim.tensors import is_dense, on_gpu, on_host, pieces, sum_of
from zerograph.runtime.comm.collectives import sum_over_ranks
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.dtensors import Groups, groups_of_ranks, is_partial, split_over
from zerograph.runtime.executor import late_gradients
from zerograph.runtime.executor.residency import Pipeline
from zerograph.runtime.joined import shards_of
from zerograph.runtime.torch_private import group_device, local_tensor

log = logging.getLogger(__name__)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of ``parameters`` in place so that their joint norm is at most ``max_norm``.

    Does what ``torch.nn.utils.clip_grad_norm_`` does, on the shards that this rank holds instead of on DTensors one by
    one. All ranks call it together.

    Args:
        parameters: sharded or plain parameters; those without gradient are skipped.
        max_norm: the largest norm allowed.
        norm_type: the p of the norm; ``math.inf`` or ``"inf"`` is the largest absolute value.
        error_if_nonfinite: raise instead of scaling by a norm that is not finite.
        stages: ranks that have the other stages of a pipeline, whose gradients are in the norm too.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        ConfigError: ``parameters`` are no tensors, ``max_norm`` is negative, ``norm_type`` not positive, or ``stages``
            no process group, or one with several ranks that a stage's gradients are split over (whole ones on each,
            as at stage 0, count several times); or the last backward has updated some of them (``overlap=True``).
        UnsupportedError: a gradient that is partial over ranks, or gradients on several meshes.
    """
    order = order_of_norm(norm_type)
    if not (isinstance(max_norm, Tensor) and max_norm.numel() == 1):  # one on a device is not waited for
        max_norm = number("max_norm", max_norm, "for example 1.0")
        require(max_norm >= 0, f"max_norm={max_norm}: the largest norm allowed cannot be negative", "for example 1.0")
    require_flag("error_if_nonfinite", error_if_nonfinite, "True raises where the norm is not finite")
    require_stages(stages)
    params = _tensors(parameters)
    late_gradients.complete(params)
    grads = [p.grad for p in params if p.grad is not None]
    local, kinds = [local_tensor(g) for g in grads], dict[Groups, list[Tensor]]()
    for own, groups in zip(local, groups_of(grads), strict=True):
        kinds.setdefault(groups, []).append(own)
    norm = _norm_over_ranks(kinds, order, stages).to(_precision(local))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        )
    # 1e-6, as in torch's: factors are the same to the bit.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
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


def require_stages(stages: object) -> None:
    """Raises:
    ConfigError: it is neither None nor a process group.
    """
    known = stages is None or isinstance(stages, dist.ProcessGroup)
    require(known, f"stages must be a process group, got {stages!r:.80}", _STAGES)


def over_stages(
    total: Tensor,
    stages: dist.ProcessGroup,
    groups: Iterable[dist.ProcessGroup],
    *,
    largest: bool = False,
    pipeline: Pipeline | None = None,
) -> Tensor:
    """``total``, one number, added up over ``stages``, or the ``largest`` of theirs. All of them call this, also one
    without gradients, or with some on another device or of another dtype.

    Args:
        groups: over which ``total`` was added up before.
        pipeline: adds up, where there is one: an error of one of its ranks ends the others' waits.

    Raises:
        ConfigError: ``stages`` has several ranks of one of ``groups``, which share one stage and would all count.
    """
    ranks = set(dist.get_process_group_ranks(stages))
    for group in groups:
        twice = len(ranks.intersection(dist.get_process_group_ranks(group)))
        require(
            twice < 2, f"stages has {twice} ranks that share one stage, whose norm would count {twice} times", _STAGES
        )
    assert pipeline is None or not largest  # it can only add up
    there = total.to("cpu" if pipeline is not None else group_device(stages), torch.float64, copy=True)
    if pipeline is not None:
        pipeline.add_up(there)
    else:
        dist.all_reduce(there, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=stages)
    return there.to(total.device)


_STAGES = 'give the ranks along the pipeline alone, for example mesh["pp"].get_group()'


def _tensors(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor | nn.Module | str)
    params = list(parameters) if several else [parameters]
    other = next((type(p).__name__ for p in params if not isinstance(p, Tensor)), None)
    require(other is None, f"parameters must be tensors, got {other}", "give model.parameters()")
    if isinstance(parameters, Generator) and not params:
        log.warning("zerograph.clip_grad_norm_ got an empty generator, used up perhaps: no gradient is clipped")
    return params  # type: ignore[return-value]


def groups_of(tensors: Sequence[Tensor]) -> list[Groups]:
    """For each of ``tensors``, the ranks over which numbers of it are added up.

    Raises:
        UnsupportedError: one is a part of a sum; or they lie on several meshes of other ranks each, whose axes these
            may come to in other orders.
    """
    for partial in filter(is_partial, tensors):
        raise UnsupportedError(
            f"cannot take the norm of a tensor placed as {partial.placements}",  # type: ignore[attr-defined]
            "use torch.nn.utils.clip_grad_norm_",
        )
    found = list(map(groups_of_ranks, tensors))
    groups, meshes = set(itertools.chain.from_iterable(found)), set(map(split_over, tensors)) - {None}
    jobs = {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes if mesh is not None}
    if len(groups) > 1 and len(jobs) > 1:
        raise UnsupportedError(
            f"tensors are split over {len(groups)} process groups of {len(jobs)} meshes, and a norm is of equal ranks",
            "take the parameters of one mesh at a time",
        )
    return found


def over_ranks(powers: Mapping[Groups, Tensor], p: float, groups: Iterable[dist.ProcessGroup]) -> dict[Groups, Tensor]:
    """``powers``, by the ranks that they are of, added up over ``groups``: those of one in one reduction.

    Args:
        powers: sums of powers ``p``, or largest values; on all ranks in the same order, where groups communicate.
    """
    op, found = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, dict(powers)
    for group in groups:
        kinds = [kind for kind in found if group in kind]
        both = torch.cat([found[kind].reshape(-1) for kind in kinds])
        dist.all_reduce(both, op=op, group=group)
        for kind, part in zip(kinds, both.split([found[kind].numel() for kind in kinds]), strict=True):
            found[kind] = part.view(found[kind].shape)
    return found


def groups_in(kinds: Iterable[Groups]) -> list[dist.ProcessGroup]:
    """Each group once; of a mesh, the last axis first."""
    return list(dict.fromkeys(itertools.chain.from_iterable(map(reversed, sorted(kinds, key=len, reverse=True)))))


def our_group(groups: Iterable[dist.ProcessGroup], tensors: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """Of ``groups`` the one over which ZeroGraph shards ``tensors``, along which its communicator sums; None where none
    does."""
    known = {shards_of(tensor.device_mesh) for tensor in tensors if isinstance(tensor, DTensor)} - {None}
    return next((group for group in groups if group in known), None)


def over_our_ranks(
    value: Tensor, comm: Communicator | None, group: dist.ProcessGroup | None, program: str, names: Iterable[str] = ()
) -> Tensor:
    """``value`` added up over the ranks of :func:`our_group`: as a ``program`` of ``comm``, where a backend has one."""
    if comm is not None:
        return sum_over_ranks(comm, value, program, names)
    dist.all_reduce(value, group=group)
    return value


def _norm_over_ranks(
    tensors: Mapping[Groups, list[Tensor]], p: float, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Norm of gradients together, the same on every rank: of this rank's parts, by the ranks that they are split over,
    and of those that ``stages`` have.

    Returns:
        A 0-d tensor where the gradients are, of float64 where kernels of ours took the norm.
    """
    # Powers, not norms, add up over ranks.
    own = {kind: power_sum(parts, p) for kind, parts in tensors.items()}
    powers = sorted(over_ranks(own, p, groups_in(own)).items(), key=lambda each: -len(each[0]))  # replicated ones last
    total = torch.zeros(())
    if powers:
        precision = functools.reduce(torch.promote_types, {power.dtype for _, power in powers})
        both = torch.stack([power.to(powers[0][1].device, precision) for _, power in powers])
        total = both.max() if math.isinf(p) else both.sum()
    if stages is not None:
        total = over_stages(total, stages, groups_in(own), largest=math.isinf(p))
    return total if math.isinf(p) else total ** (1.0 / p)


def power_sum(grads: list[Tensor], p: float) -> Tensor:
    """Sum of ``|g|**p`` over all elements of some ``grads``, or their largest absolute value."""
    if p == 2.0 and on_host(grads):
        dense = [g if is_dense(g) else g.contiguous() for g in grads]
        return torch.tensor(sum_of(_core.squares(pieces(dense))), dtype=torch.float64, device="cpu")
    if p == 2.0 and on_gpu(grads):
        from zerograph.runtime.kernels.sum_of_squares import sum_of_squares  # imports Triton

        return sum_of_squares([g if is_dense(g) else g.contiguous() for g in grads])
    powers = power_sums(grads, p)
    return powers.max() if math.isinf(p) else powers.sum()


def power_sums(tensors: list[Tensor], p: float) -> Tensor:
    """For each tensor by itself, the sum of ``|x|**p`` over its elements, or the largest absolute value."""
    if p == 2.0 and on_host(tensors):
        dense = [t if is_dense(t) else t.contiguous() for t in tensors]
        return torch.tensor([sum_of(_core.squares(pieces([t]))) for t in dense], dtype=torch.float64, device="cpu")
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
