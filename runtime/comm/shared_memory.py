"""Collectives between CPU ranks of one host, through shared memory.

Starting an operation copies this rank's data into memory that its peers can map, and never waits; finishing it waits
for the peers and reads theirs. There is no thread: the calling one does all copies, in C++, without the GIL. Gradients
travel in their own dtype and are summed in rank order in float32 (float64 for float64), so every rank and every stage
gets the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import zerograph._core as _core
from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.core.plan import Param
from zerograph.runtime.buffers import BufferPool, Full, allocate_full, torch_dtype
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, describe_difference
from zerograph.runtime.comm.rendezvous import Rendezvous, shared
from zerograph.runtime.comm.store_client import StoreLost
from zerograph.runtime.comm.waiting import LOOK, BegunWait
from zerograph.runtime.own_stream import Wait

log = logging.getLogger(__name__)

EXPLAINING = 5.0
"""Seconds to wait for what other ranks run, when their messages are not those of this rank's program."""

_WIRE = {
    torch.float32: _core.DType.float32,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float16: _core.DType.float16,
    torch.float64: _core.DType.float64,
}
_ODD, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
_RAW = {1: _core.DType.raw1, 2: _core.DType.raw2, 4: _core.DType.raw4, 8: _core.DType.raw8}


@dataclass(slots=True)
class _Gathering:
    params: Sequence[Param]
    ticket: int


@dataclass(slots=True)
class _Reducing:
    """``parts`` are the two kinds of one bucket: sharded gradients and unsharded ones, each with its ticket."""

    params: Sequence[Param]
    grads: list[Tensor]
    scattered: tuple[int, list[int]] | None
    unsharded: tuple[int, list[int]] | None


@dataclass(slots=True)
class _Exchanging:
    ticket: int
    most: list[int]  # bytes of the largest message for each rank
    coming: list[int]  # bytes of each rank's message for this one


class SharedMemoryCommunicator(Communicator):
    """The transport whose messages are in a mailbox that ranks share."""

    name = "shared memory"
    pool: BufferPool
    rendezvous: Rendezvous

    def __init__(self, mailbox: _core.Mailbox, rendezvous: Rendezvous, ranks: Sequence[int]) -> None:
        """``ranks`` are those of the mailbox as ``rendezvous`` numbers them."""
        self.mailbox, self.rendezvous, self.ranks = mailbox, rendezvous, ranks
        self.rank, self.world_size = ranks.index(rendezvous.rank), len(ranks)
        self.pool = BufferPool()
        self._recovered = rendezvous.generation  # the mailbox's generation
        self.entry, self.steps = Entry("start", 0, 0), 0
        self._salt = 0  # a part of every tag: of messages in other programs, and after other steps, none is equal
        rendezvous.present = _present(mailbox, ranks, rendezvous.present)
        weakref.finalize(self, mailbox.close)

    def start_gather(
        self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
    ) -> _Gathering:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`; nothing comes ``behind`` a copy to a CPU."""
        pieces = [(shard, torch_dtype(p.compute_dtype)) for p, shard in zip(params, shards, strict=True)]
        return _Gathering(params, self.begin_gather(params, pieces))

    def begin_gather(self, params: Sequence[Param], pieces: Sequence[tuple[Tensor, torch.dtype]]) -> int:
        """Show the other ranks ``pieces`` of these parameters, each in a dtype; returns the ticket for
        :meth:`end_gather`."""
        copies = [piece.contiguous() for piece, _ in pieces]  # live until the core has read them: when it returns
        sources = [
            (copy.data_ptr(), copy.numel(), _wire_of(copy.dtype), _wire_of(dtype))
            for copy, (_, dtype) in zip(copies, pieces, strict=True)
        ]
        with self._explained("gather", params):
            return self.mailbox.start_gather(self._tag(params), sources)

    def end_gather(self, params: Sequence[Param], ticket: int, outs: Sequence[tuple[Tensor, int]]) -> None:
        """Write each piece of all ranks into its memory in ``outs``, where each rank's has so many elements of room."""
        places = [(out.data_ptr(), room) for out, room in outs]
        self._finish("gather", params, ticket, lambda wait: self.mailbox.finish_gather(ticket, places, wait))

    def finish_gather(self, pending: _Gathering) -> list[Tensor]:
        full: Full = allocate_full(pending.params, torch.device("cpu"), self.pool)
        # Only now: until the peers' data is read, the bucket needs no memory of its own.
        rooms = [p.chunk_elements for p in pending.params]
        self.end_gather(pending.params, pending.ticket, list(zip(full.padded, rooms, strict=True)))
        return full.tensors

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """Begin a program, whose entry is in the tag of every message."""
        self.rejoin()
        if self.mailbox.aborted():
            self.rendezvous.check(f"with the {entry.program}")
        self.entry, self.steps = entry, entry.steps
        self.rendezvous.programs += 1
        # An odd factor spreads the steps over 64 bits: a sum of small numbers could equal another program's.
        self._salt = (entry.sequence + entry.steps * _ODD) & _MASK

    def rejoin(self) -> None:
        if self.rendezvous.failed:
            self.rendezvous.meet()
        self._follow()

    def _follow(self) -> None:
        """Bring the mailbox to the rendezvous's generation, which a Ctrl-C after they met may have kept from it."""
        if self._recovered != self.rendezvous.generation:
            # First: a signal is handled after the next call, not before it.
            self._recovered = self.rendezvous.generation
            self.mailbox.recover(self._recovered)

    def leave(self) -> None:
        with self._explained("end"):
            ticket = self.mailbox.start_gather(self._salt, [])
        self._finish("end", (), ticket, lambda wait: self.mailbox.finish_gather(ticket, [], wait))

    def _finish(self, verb: str, params: Sequence[Param], ticket: int, finish: Callable[[float], None]) -> None:
        """``finish(seconds)``, which may be called again after its TimeoutError, as long as there is hope."""
        # A peer that fails says so in the mailbox; of ranks beside it the store tells.
        alone = len(self.ranks) == self.rendezvous.world_size
        first = min(self.rendezvous.notice_after if alone else LOOK, self.rendezvous.timeout)
        with self._explained(verb, params):
            if _in_time(finish, first):
                return
            doing, missing = self._doing(verb, params), partial(self._missing, ticket)
            with BegunWait(self.rendezvous, doing, missing, waited=first) as wait:
                wait.look()
                while not _in_time(finish, LOOK):
                    wait.look()

    def _missing(self, ticket: int) -> list[int]:
        return [self.ranks[place] for place in self.mailbox.missing(ticket)]

    def _doing(self, verb: str, params: Sequence[Param]) -> str:
        what = f"{verb} {_names(params)} in" if params else verb
        return f"to {what} the {self.entry.program}"

    def _tag(self, params: Sequence[Param]) -> int:
        return _digest(params) ^ self._salt

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _Reducing:
        dense = [summable(g, p).contiguous() for p, g in zip(params, grads, strict=True)]
        tickets = []
        for sharded in (True, False):
            members = [i for i, p in enumerate(params) if p.sharded is sharded]
            pieces = [(dense[i], params[i].summed_elements) for i in members]
            own = [params[i] for i in members]
            tickets.append((self.begin_reduce(own, pieces, sharded=sharded), members) if members else None)
        return _Reducing(params, dense, *tickets)

    def begin_reduce(
        self, params: Sequence[Param], pieces: Sequence[tuple[Tensor, int]], *, sharded: bool = True
    ) -> int:
        """Show the other ranks ``pieces`` of gradients of these parameters, which stay as they are until
        :meth:`end_reduce`; each rank sums so many elements of each, in the order of ranks. Returns the ticket.

        ``sharded``: each rank gets its own sums, and not all of them.
        """
        begin = self.mailbox.start_reduce if sharded else self.mailbox.start_all_reduce
        summed = [(piece.data_ptr(), piece.numel(), own, _wire_of(piece.dtype)) for piece, own in pieces]
        with self._explained("reduce", params):
            return begin(self._tag(params), summed)

    def end_reduce(
        self, params: Sequence[Param], ticket: int, outs: Sequence[Tensor], scale: float, *, sharded: bool = True
    ) -> None:
        """Write this rank's part of each sum, or all of it, times ``scale`` into its memory in ``outs``, in their
        dtypes."""
        finish = self.mailbox.finish_reduce if sharded else self.mailbox.finish_all_reduce
        places = [(out.data_ptr(), _wire_of(out.dtype)) for out in outs]
        self._finish("reduce", params, ticket, partial(finish, ticket, places, scale))

    def finish_reduce(self, pending: _Reducing) -> list[Tensor]:
        shapes = [p.shard_shape(self.rank) for p in pending.params]
        results = [
            torch.empty(s, dtype=torch_dtype(p.dtype), device="cpu")
            for s, p in zip(shapes, pending.params, strict=True)
        ]
        for sharded, part in ((True, pending.scattered), (False, pending.unsharded)):
            if part is not None:
                ticket, members = part
                own, outs = [pending.params[i] for i in members], [results[i] for i in members]
                self.end_reduce(own, ticket, outs, 1.0 / self.world_size, sharded=sharded)
        return results

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> _Exchanging:
        """See :class:`~zerograph.runtime.comm.communicator.Communicator`: a gather of one piece for each rank."""
        pieces = [(send.data_ptr(), send.numel(), _core.DType.raw1, _core.DType.raw1) for send in sends]
        with self._explained("exchange matrices in"):
            ticket = self.mailbox.start_gather(_digest_of(f"exchange {sizes}") ^ self._salt, pieces)
        return _Exchanging(ticket, [max(column) for column in zip(*sizes, strict=True)], [s[self.rank] for s in sizes])

    def finish_exchange(self, pending: _Exchanging) -> list[Tensor]:
        ticket, most = pending.ticket, pending.most
        own = torch.empty(self.world_size * most[self.rank], dtype=torch.uint8, device="cpu")
        # A gather copies every piece. Those for other ranks go to one place, so that a rank needs no memory for all.
        largest = max((size for rank, size in enumerate(most) if rank != self.rank), default=0)
        others = self.pool.take(self.world_size * largest)
        outs = [(own.data_ptr() if r == self.rank else others.data_ptr(), size) for r, size in enumerate(most)]
        self._finish("exchange matrices in", (), ticket, lambda wait: self.mailbox.finish_gather(ticket, outs, wait))
        return [own.narrow(0, rank * most[self.rank], size) for rank, size in enumerate(pending.coming)]

    def abort(self, reason: str) -> None:
        self._follow()  # else the mailbox ends a generation that is over, and nobody hears
        self.rendezvous.fail(reason)
        self.mailbox.abort(reason)

    @contextlib.contextmanager
    def _explained(self, verb: str, params: Sequence[Param] = ()) -> Iterator[None]:
        """Name program, parameters and ranks in what the core raises."""
        try:
            yield
        except _core.MismatchError as error:
            raise self._difference(self._doing(verb, params), error) from error
        except _core.PeerError as error:
            doing = self._doing(verb, params)
            with contextlib.suppress(StoreLost):  # if it ended with the peer: the mailbox says who and why as well
                self.rendezvous.check(doing)
                self.rendezvous.refuse_gone(self.ranks, doing)
            raise RankError(f"cannot go on {doing}: {error}", "look at the output of the rank that is named") from error

    def _difference(self, doing: str, error: _core.MismatchError) -> CollectiveMismatch:
        """The error with another rank's program; all see that messages differ as soon as they read one, and tell."""
        store, name, mine, me = self.rendezvous.store, f"{self.generation}/entered", self.entry, self.rendezvous.rank
        store.set(f"{name}/{me}", mine.to_json())
        deadline = time.monotonic() + EXPLAINING
        for rank in [r for r in self.ranks if r != me]:
            while not store.has(f"{name}/{rank}") and time.monotonic() < deadline:
                time.sleep(0.01)
            if store.has(f"{name}/{rank}"):
                theirs = Entry.from_json(store.get(f"{name}/{rank}"))
                if theirs != mine:
                    return describe_difference(mine, rank, theirs, me)
        return CollectiveMismatch(
            f"rank {me} waits {doing}, after {mine.steps} optimizer steps; another rank is at another "
            f"operation: {error}",
            "every rank must run the same forward and backward calls in the same order",
        )


def _in_time(finish: Callable[[float], None], seconds: float) -> bool:
    try:
        finish(seconds)
    except TimeoutError:
        return False
    return True


def _wire_of(dtype: torch.dtype) -> _core.DType:
    return _WIRE.get(dtype) or _RAW[dtype.itemsize]


def summable(grad: Tensor, param: Param) -> Tensor:
    """The mailbox sums in float32 at least; only a wider reduction needs a wider gradient."""
    return grad.double() if param.reduce_dtype == "float64" else grad


def _digest(params: Sequence[Param]) -> int:
    return _digest_of("|".join(p.name for p in params))


def _digest_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _names(params: Sequence[Param]) -> str:
    return params[0].name + (f" and {len(params) - 1} more parameters" if len(params) > 1 else "")


def open_shared_memory(
    group: dist.ProcessGroup,
    rendezvous: Rendezvous | None = None,
    ranks: Sequence[int] | None = None,
    of_each_host: int | None = None,
) -> SharedMemoryCommunicator | None:
    """A mailbox between the ranks of ``group``, who all call this; None when they cannot share memory.

    ``of_each_host``: so many, one after the other, share a mailbox; all, unless given.
    """
    rendezvous = rendezvous or Rendezvous.open(group, torch.device("cpu"))
    ranks = range(group.size()) if ranks is None else ranks
    each = of_each_host or len(ranks)
    first = group.rank() - group.rank() % each
    here = slice(first, first + each)
    # Another job's mailbox on this host must not be taken for one of ours.
    token = random.SystemRandom().getrandbits(63)
    mine = _core.Mailbox(group.rank() - first, each, shared(group, token)[first])
    reason = _connect(mine, shared(group, (mine.pid, mine.control_fd))[here])
    # All decide together: a rank that cannot map its peers would leave them waiting in shared memory.
    reasons = [r for r in shared(group, reason) if r]
    if reasons:
        log.info("no shared memory between ranks, using gloo: %s", reasons[0])
        mine.close(0.0)
        return None
    return SharedMemoryCommunicator(mine, rendezvous, ranks[here])


def _present(mailbox: _core.Mailbox, ranks: Sequence[int], elsewhere: Callable[[int], bool]) -> Callable[[int], bool]:
    """Whether the process of a rank is there: ``mailbox`` knows of ``ranks``, and of others who did before."""
    places = {rank: place for place, rank in enumerate(ranks)}
    return lambda rank: mailbox.is_present(places[rank]) if rank in places else elsewhere(rank)


def _connect(mailbox: _core.Mailbox, peers: list[tuple[int, int]]) -> str:
    try:
        mailbox.connect(peers)
    except _core.ConnectError as error:
        return str(error)
    return ""
