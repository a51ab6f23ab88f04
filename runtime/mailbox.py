"""Collectives between CPU ranks of one host, through shared memory.

Starting an operation copies this rank's data into memory that its peers can map, and never waits; finishing it waits
for the peers and reads theirs. There is no thread: the calling one does all copies, in C++, without the GIL. Gradients
travel in their own dtype and are summed in rank order in float32 (float64 for float64), so every rank and every stage
gets the same bits.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _core
from zerograph.errors import CollectiveMismatch, RankError
from zerograph.plan import Param
from zerograph.runtime.buffers import BufferPool, Full, allocate_full, shard_shape, torch_dtype

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT = 1800.0
"""Seconds to wait for a peer that is alive; torch.distributed's own default for gloo."""

_WIRE = {
    torch.float32: _core.DType.float32,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float16: _core.DType.float16,
    torch.float64: _core.DType.float64,
}
_RAW = {1: _core.DType.raw1, 2: _core.DType.raw2, 4: _core.DType.raw4, 8: _core.DType.raw8}


@dataclass(slots=True)
class _Gathering:
    params: Sequence[Param]
    ticket: int


@dataclass(slots=True)
class _Reducing:
    """``parts`` are the two kinds of one bucket: split gradients and whole ones, each with its ticket."""

    params: Sequence[Param]
    grads: list[Tensor]
    scattered: tuple[int, list[int]] | None
    whole: tuple[int, list[int]] | None


class MailboxCommunicator:
    """See :class:`~zerograph.runtime.comm.Communicator`."""

    name = "shared memory"

    def __init__(self, mailbox: _core.Mailbox, rank: int, world_size: int) -> None:
        self.mailbox, self.rank, self.world_size = mailbox, rank, world_size
        self.pool = BufferPool()
        weakref.finalize(self, mailbox.close)

    def trim(self) -> None:
        """See :class:`~zerograph.runtime.comm.Communicator`."""
        self.pool.trim()

    def start_gather(self, params: Sequence[Param], shards: Sequence[Tensor]) -> _Gathering:
        """See :class:`~zerograph.runtime.comm.Communicator`."""
        pieces = []
        for p, shard in zip(params, shards, strict=True):
            source, wire = shard.contiguous(), torch_dtype(p.compute_dtype)
            pieces.append((source.data_ptr(), source.numel(), _tag(source.dtype), _tag(wire)))
        with _explained("gather", params):
            return _Gathering(params, self.mailbox.start_gather(_digest(params), pieces))

    def finish_gather(self, pending: _Gathering) -> list[Tensor]:
        """See :class:`~zerograph.runtime.comm.Communicator`."""
        full: Full = allocate_full(pending.params, self.world_size, torch.device("cpu"), self.pool)
        outs = [(flat.data_ptr(), flat.numel() // self.world_size) for flat in full.padded]
        with _explained("gather", pending.params):
            self.mailbox.finish_gather(pending.ticket, outs, TIMEOUT)
        return full.tensors

    def enter(self, sequence: int) -> None:
        """Every message bears a tag that is compared where it is read."""

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _Reducing:
        """See :class:`~zerograph.runtime.comm.Communicator`."""
        dense = [_summable(g, p).contiguous() for p, g in zip(params, grads, strict=True)]
        scattered = self._start(params, dense, sharded=True)
        return _Reducing(params, dense, scattered, self._start(params, dense, sharded=False))

    def _start(self, params: Sequence[Param], grads: list[Tensor], *, sharded: bool) -> tuple[int, list[int]] | None:
        members = [i for i, p in enumerate(params) if p.sharded == sharded]
        if not members:
            return None
        pieces = []
        for i in members:
            chunk = params[i].chunk_elements(self.world_size) if sharded else -(-grads[i].numel() // self.world_size)
            pieces.append((grads[i].data_ptr(), grads[i].numel(), chunk, _tag(grads[i].dtype)))
        begin = self.mailbox.start_reduce if sharded else self.mailbox.start_all_reduce
        with _explained("reduce", params):
            return begin(_digest([params[i] for i in members]), pieces), members

    def finish_reduce(self, pending: _Reducing) -> list[Tensor]:
        """See :class:`~zerograph.runtime.comm.Communicator`."""
        shapes = [shard_shape(p, self.rank, self.world_size) for p in pending.params]
        results = [torch.empty(s, dtype=torch_dtype(p.dtype)) for s, p in zip(shapes, pending.params, strict=True)]
        scale = 1.0 / self.world_size
        finish = {True: self.mailbox.finish_reduce, False: self.mailbox.finish_all_reduce}
        for sharded, part in ((True, pending.scattered), (False, pending.whole)):
            if part is not None:
                outs = [(results[i].data_ptr(), _tag(results[i].dtype)) for i in part[1]]
                with _explained("reduce", pending.params):
                    finish[sharded](part[0], outs, scale, TIMEOUT)
        return results

    def abort(self, reason: str) -> None:
        """Let peers that wait for this rank fail at once with ``reason``."""
        self.mailbox.abort(reason)


def _tag(dtype: torch.dtype) -> _core.DType:
    return _WIRE.get(dtype) or _RAW[dtype.itemsize]


def _summable(grad: Tensor, param: Param) -> Tensor:
    """The mailbox sums in float32 at least; only a wider reduction needs a wider gradient."""
    return grad.double() if param.reduce_dtype == "float64" else grad


def _digest(params: Sequence[Param]) -> int:
    text = "|".join(p.name for p in params)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextmanager
def _explained(verb: str, params: Sequence[Param]) -> Iterator[None]:
    """Name the parameters in what the core raises."""
    try:
        yield
    except _core.MismatchError as error:
        raise CollectiveMismatch(
            f"this rank wants to {verb} {_names(params)}; another rank is at another operation: {error}",
            "every rank must run the same forward and backward calls in the same order",
        ) from error
    except (_core.PeerError, TimeoutError) as error:
        raise RankError(
            f"cannot {verb} {_names(params)}: {error}", "look at the output of the rank that is named"
        ) from error


def _names(params: Sequence[Param]) -> str:
    return params[0].name + (f" and {len(params) - 1} more parameters" if len(params) > 1 else "")


def open_mailbox(group: dist.ProcessGroup) -> MailboxCommunicator | None:
    """A mailbox between the ranks of ``group``, who all call this; None when they cannot share memory."""
    rank, world = group.rank(), group.size()
    token = random.SystemRandom().getrandbits(63)
    mine = _core.Mailbox(rank, world, _shared(group, token)[0])
    peers = _shared(group, (_host(), mine.pid, mine.control_fd))
    reason = "ranks on several hosts" if len({host for host, *_ in peers}) > 1 else _connect(mine, peers)
    reasons = [r for r in _shared(group, reason) if r]
    if reasons:
        log.info("no shared memory between ranks, using gloo: %s", reasons[0])
        mine.close(0.0)
        return None
    return MailboxCommunicator(mine, rank, world)


def _connect(mailbox: _core.Mailbox, peers: list[tuple[str, int, int]]) -> str:
    try:
        mailbox.connect([(pid, fd) for _, pid, fd in peers])
    except _core.ConnectError as error:
        return str(error)
    return ""


def _shared(group: dist.ProcessGroup, value: T) -> list[T]:
    values: list[T] = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{os.uname().nodename} {file.read().strip()}"
