"""Collectives of whole buckets over one process group.

A communicator starts and finishes two operations: gathering shards into full parameters, and averaging full gradients
into shards (parameters that every rank holds whole are all-reduced). Every rank must issue the same operations on the
same parameters in the same order; programs see to that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.errors import CollectiveMismatch, ConfigError
from zerograph.plan import Param
from zerograph.runtime.buffers import Full, allocate_full, shard_shape, torch_dtype

# Renamed in torch 2.13, which warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicator(Protocol):
    """What the executor needs of a transport."""

    name: str
    rank: int
    world_size: int

    def trim(self) -> None:
        """Let go of memory that is kept to be used again."""

    def enter(self, sequence: int) -> None:
        """This rank begins a program whose collectives hash to ``sequence``."""

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor]) -> Any:
        """Begin to gather ``shards`` (this rank's rows, maybe none); returns what :meth:`finish_gather` takes."""

    def finish_gather(self, pending: Any) -> list[Tensor]:
        """The full parameters, in compute dtype, contiguous."""

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> Any:
        """Begin to average full gradients; they may not change before :meth:`finish_reduce`."""

    def finish_reduce(self, pending: Any) -> list[Tensor]:
        """This rank's rows of the averaged gradients, in the shard's dtype."""

    def abort(self, reason: str) -> None:
        """This rank failed: let the others fail too, if the transport can tell them."""


@dataclass(slots=True)
class _PendingGather:
    params: Sequence[Param]
    full: Full
    works: list[dist.Work]
    received: list[Tensor] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _PendingReduce:
    params: Sequence[Param]
    results: list[Tensor]
    works: list[dist.Work]
    kept: list[Tensor]


class GroupCommunicator:
    """Collectives of ``torch.distributed``: NCCL, gloo, or any other backend.

    On NCCL the all-gathers of a bucket are coalesced into one launch and write straight into the full parameters;
    elsewhere a bucket travels as one flat message and is copied out. An NCCL group runs its collectives on one stream
    of its own, so reductions get a second group: they overlap gathers as well as compute.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.reduce_group = group
        if backend_name(group, device) == "nccl" and group.size() > 1:
            ranks = dist.get_process_group_ranks(group)
            self.reduce_group = dist.new_group(ranks, use_local_synchronization=True, group_desc="zerograph-reduce")
        self.name = f"torch.distributed ({backend_name(group, device)})"
        self.rank, self.world_size = group.rank(), group.size()
        self.coalesces = backend_name(group, device) == "nccl"
        self.compares = backend_name(group, device) == "gloo"

    def trim(self) -> None:
        """There is none."""

    def enter(self, sequence: int) -> None:
        """Compare with the other ranks, on gloo; on NCCL that would wait for the device.

        Raises:
            CollectiveMismatch: another rank begins another program, whose messages would be taken for this one's.
        """
        if not self.compares:
            return
        everyone = torch.empty(self.world_size, dtype=torch.int64)
        _all_gather(everyone, torch.tensor([sequence]), group=self.group)
        different = [rank for rank, theirs in enumerate(everyone.tolist()) if theirs != sequence]
        if different:
            raise CollectiveMismatch(
                f"rank {self.rank} and rank {different[0]} are about to run different programs",
                "all ranks must take the same branches, and call the model in training and evaluation together",
            )

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor]) -> _PendingGather:
        """See :class:`Communicator`."""
        full = allocate_full(params, self.world_size, self.device)
        sends = [self._padded_shard(p, s) for p, s in zip(params, shards, strict=True)]
        if self.coalesces:
            with dist._coalescing_manager(self.group, self.device, async_ops=True) as manager:
                for out, send in zip(full.padded, sends, strict=True):
                    _all_gather(out, send, group=self.group, async_op=True)
            return _PendingGather(params, full, [manager], sent=sends)
        flat = torch.cat([s.view(torch.uint8) for s in sends])
        received = flat.new_empty(self.world_size * flat.numel())
        work = _all_gather(received, flat, group=self.group, async_op=True)
        return _PendingGather(params, full, [work], [received], [flat])  # type: ignore[list-item]

    def finish_gather(self, pending: _PendingGather) -> list[Tensor]:
        """See :class:`Communicator`."""
        for work in pending.works:
            work.wait()
        for received in pending.received:
            by_rank = received.view(self.world_size, -1)
            offset = 0
            for padded in pending.full.padded:
                out = padded.view(torch.uint8).view(self.world_size, -1)
                out.copy_(by_rank[:, offset : offset + out.shape[1]])
                offset += out.shape[1]
        return pending.full.tensors

    def _padded_shard(self, param: Param, shard: Tensor) -> Tensor:
        dtype, length = torch_dtype(param.compute_dtype), param.chunk_elements(self.world_size)
        if shard.dtype == dtype and shard.numel() == length and shard.is_contiguous():
            return shard.detach().view(-1)
        send = torch.zeros(length, dtype=dtype, device=self.device)
        send[: shard.numel()] = shard.reshape(-1)
        return send

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _PendingReduce:
        """See :class:`Communicator`."""
        results: list[Tensor] = [None] * len(params)  # type: ignore[list-item]
        works, kept = [], []
        for dtype, sharded in dict.fromkeys((p.reduce_dtype, p.sharded) for p in params):
            members = [i for i, p in enumerate(params) if (p.reduce_dtype, p.sharded) == (dtype, sharded)]
            chosen = [params[i] for i in members]
            run = self._reduce_scatter if sharded else self._all_reduce
            parts, work, send = run(chosen, [grads[i] for i in members], torch_dtype(dtype))
            works.append(work)
            kept.append(send)
            for i, part in zip(members, parts, strict=True):
                results[i] = part
        return _PendingReduce(params, results, works, kept)

    def _reduce_scatter(
        self, params: Sequence[Param], grads: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], dist.Work, Tensor]:
        lengths = [p.chunk_elements(self.world_size) for p in params]
        send = torch.zeros(self.world_size, sum(lengths), dtype=dtype, device=self.device)
        offset = 0
        for p, grad, length in zip(params, grads, lengths, strict=True):
            row = length // max(1, p.chunk_rows(self.world_size))
            flat = grad.reshape(-1)
            for rank in range(self.world_size):
                first, last = p.shard_rows(rank, self.world_size)
                send[rank, offset : offset + (last - first) * row] = flat[first * row : last * row]
            offset += length
        out = send.new_empty(sum(lengths))
        work = _reduce_scatter(out, send.view(-1), group=self.reduce_group, async_op=True)
        parts = [
            part[: prod(shard_shape(p, self.rank, self.world_size))]
            for p, part in zip(params, out.split(lengths), strict=True)
        ]
        return parts, work, send  # type: ignore[return-value]

    def _all_reduce(
        self, params: Sequence[Param], grads: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], dist.Work, Tensor]:
        flat = torch.cat([g.reshape(-1).to(dtype) for g in grads])
        work = dist.all_reduce(flat, group=self.reduce_group, async_op=True)
        return list(flat.split([p.elements for p in params])), work, flat  # type: ignore[return-value]

    def finish_reduce(self, pending: _PendingReduce) -> list[Tensor]:
        """See :class:`Communicator`."""
        for work in pending.works:
            work.wait()
        return [
            (result / self.world_size).to(torch_dtype(p.dtype)).view(shard_shape(p, self.rank, self.world_size))
            for p, result in zip(pending.params, pending.results, strict=True)
        ]

    def abort(self, reason: str) -> None:
        """Peers find out by torch.distributed's own timeout, or when this process ends."""


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """ "gloo", "nccl", ...: what carries tensors on ``device`` (a group made without a name has one per device)."""
    return str(group._get_backend(device).name())  # dist.get_backend says "undefined" for such a group


def connect(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """The fastest transport between the ranks of ``group``, who all call this.

    CPU ranks of one host share memory; ``ZEROGRAPH_TRANSPORT=group`` keeps to the process group.

    Raises:
        ConfigError: ``ZEROGRAPH_TRANSPORT`` is neither "auto" nor "group".
    """
    wanted = os.environ.get("ZEROGRAPH_TRANSPORT", "auto")
    if wanted not in ("auto", "group"):
        raise ConfigError(f"ZEROGRAPH_TRANSPORT={wanted!r}", 'it may be "auto" or "group"')
    if device.type == "cpu" and wanted == "auto" and backend_name(group, device) == "gloo":
        from zerograph.runtime.mailbox import open_mailbox  # needs the native core, which other transports do not

        mailbox = open_mailbox(group)
        if mailbox is not None:
            return mailbox
    return GroupCommunicator(group, device)
