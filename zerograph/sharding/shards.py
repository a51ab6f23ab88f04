"""Moving one parameter between its shards and its full tensor, and agreeing on failures; outside of any program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerograph.core.errors import ZeroGraphError
from zerograph.core.layout import largest, rows_of
from zerograph.runtime.comm.axes import axes_of
from zerograph.runtime.dtensors import (
    group_of_ranks,
    has_first_replica,
    is_sharded,
    is_split_by_rows,
    own_part,
    own_slices,
    placements_of,
    split_dim,
    split_over,
    splits,
)
from zerograph.runtime.joined import other_axis, our_axes
from zerograph.runtime.torch_private import as_dtensor, device_for_host, local_tensor


def default_group() -> dist.ProcessGroup | None:
    """All ranks of the job; None in a lone process."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is rank 0 of ``group``, the rank that writes files and whose values count."""
    return group is None or group.rank() == 0


def first_rank(group: dist.ProcessGroup) -> int:
    """The global rank of rank 0 of ``group``."""
    return dist.get_global_rank(group, 0)


def local_of(param: Tensor) -> Tensor:
    """This rank's part of ``param``, outside of autograd; shares its memory."""
    value = param.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def as_shard(value: Tensor, like: DTensor) -> DTensor:
    """The part that this rank holds of ``like``, where that is, of the full ``value``; no communication.

    ``value`` may also lie on the axis that ``like`` has beside ours already, as its parameter did.
    """
    if isinstance(value, DTensor):
        ours = our_axes(like.device_mesh)
        part = local_tensor(value.redistribute(value.device_mesh, like.placements[ours.ndim :]))
        rows = own_part(part, ours, split_dim(like)) if splits(like.placements[ours.ndim - 1]) else part
    else:
        rows = value[own_slices(like)]
    own = _owned(rows, value)
    own = own if own.is_meta else own.to(like.device)
    return as_dtensor(own, like.device_mesh, like.placements, like.shape, like.stride())


def _owned(rows: Tensor, value: Tensor) -> Tensor:
    # A clone of the rows: a view would keep the full tensor alive.
    if rows.shape == value.shape:
        return rows.contiguous()
    return rows.clone(memory_format=torch.contiguous_format)


def local_rows(value: Tensor, mesh: DeviceMesh, sharded: bool, device: torch.device, dim: int = 0) -> DTensor:
    """The part of the full ``value`` along ``dim`` that this rank holds on ``device``, all unless ``sharded``; no
    communication."""
    local = _owned(own_part(value, mesh, dim), value) if sharded else value.contiguous()
    local = local if local.is_meta else local.to(device)
    return as_dtensor(local, mesh, placements_of(sharded, mesh, dim), value.shape, value.contiguous().stride())


def full_value(param: Tensor) -> Tensor:
    """The full values of ``param`` as a new plain tensor, on every rank. Collective."""
    return param.detach().full_tensor() if is_sharded(param) else local_of(param).clone()  # type: ignore[attr-defined]


def gather_to_first(param: Tensor) -> list[Tensor]:
    """The rows of all ranks, in order, on rank 0, and nothing on the others. Collective where ``param`` is sharded.

    One that is not split by rows alone comes together on every rank."""
    local = local_of(param)
    if not is_sharded(param):
        return [local]
    if not is_split_by_rows(param):
        return [full_value(param)]
    if not has_first_replica(param):
        return []
    group = group_of_ranks(param)
    world, rows = group.size(), param.shape[0]
    # `gather` wants pieces of one size: short shards are padded.
    send = local.new_zeros((largest(rows, world), *param.shape[1:]))
    send[: local.shape[0]] = local
    received = [torch.empty_like(send) for _ in range(world)] if is_first(group) else None
    dist.gather(send, received, dst=first_rank(group), group=group)
    ranges = [rows_of(rows, rank, world) for rank in range(world)]
    return [piece[: r.stop - r.start] for piece, r in zip(received or [], ranges, strict=False)]


def send_from_first(full: Tensor | None, local: Tensor, group: dist.ProcessGroup | None, like: Tensor) -> None:
    """Fill ``local`` with the values of rank 0 of ``group``. Collective.

    Args:
        full: all values, on rank 0; unused elsewhere.
        local: this rank's part, which is all where the tensor is not split.
        group: all ranks that have the tensor; None for one.
        like: how the tensor lies.
    """
    mesh = split_over(like)
    with torch.no_grad():
        if group is None or group.size() == 1:
            if _given(full).data_ptr() != local.data_ptr():  # else it was filled in its place
                local.copy_(_given(full))
        elif mesh is not None and (other_axis(mesh) is not None or not is_split_by_rows(like)):
            whole = _given(full).detach().to(local).contiguous() if is_first(group) else local.new_empty(like.shape)
            dist.broadcast(whole, src=first_rank(group), group=group)
            local.copy_(whole[own_slices(like)])
        elif mesh is None:
            sent = local.contiguous()
            if is_first(group):
                sent.copy_(_given(full))
            dist.broadcast(sent, src=first_rank(group), group=group)
            local.copy_(sent)
        else:
            axes, rows = axes_of(mesh), like.shape[0]
            split = local.new_empty((largest(rows, axes.shards.size()), *local.shape[1:]))
            if axes.replicas is None or is_first(axes.replicas):
                _scatter(full, split, rows, axes.shards)
            if axes.replicas is not None:
                dist.broadcast(split, src=first_rank(axes.replicas), group=axes.replicas)
            local.copy_(split[: local.shape[0]])


def _scatter(full: Tensor | None, received: Tensor, rows: int, group: dist.ProcessGroup) -> None:
    world, pieces = group.size(), None
    if is_first(group):
        given = _given(full).detach().to(received).contiguous()
        pieces = [_padded(given[rows_of(rows, rank, world)], received) for rank in range(world)]
    dist.scatter(received, pieces, src=first_rank(group), group=group)


def _padded(piece: Tensor, like: Tensor) -> Tensor:
    if piece.shape == like.shape:
        return piece
    padded = torch.zeros_like(like)
    padded[: piece.shape[0]] = piece
    return padded


def _given(full: Tensor | None) -> Tensor:
    assert full is not None
    return full


def agree(
    group: dist.ProcessGroup | None, action: Callable[[], Any], error: type[ZeroGraphError], *, first: bool = False
) -> None:
    """Run ``action`` on every rank, or on rank 0 alone if it is for the ``first``; where it fails on one, every rank
    raises ``error``. Collective."""
    caught: Exception | None = None
    if is_first(group) or not first:
        try:
            action()
        except Exception as problem:
            caught = problem
    mine = None if caught is None else (describe(caught), getattr(caught, "hint", ""))
    failures = _failures(group, mine) if group is not None and group.size() > 1 else []
    if mine is not None:
        raise error(*mine) from caught
    if failures:
        rank, (text, hint) = failures[0]
        raise error(f"on rank {rank}: {text}", hint)


def _failures(group: dist.ProcessGroup, mine: tuple[str, str] | None) -> list[tuple[int, tuple[str, str]]]:
    """The ranks that failed, and why; one small message where there are none."""
    flag = torch.tensor([mine is not None], dtype=torch.uint8, device=device_for_host(group))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    found: list[Any] = [None] * group.size()
    if flag.item():
        dist.all_gather_object(found, mine, group=group)
    return [(rank, failure) for rank, failure in enumerate(found) if failure is not None]


def describe(failure: BaseException) -> str:
    """One sentence for ``failure``, without the hint of our own errors."""
    if isinstance(failure, ZeroGraphError):
        return str(failure).split("\n\nhint:")[0]
    return f"{type(failure).__name__}: {failure}"
