"""Collectives of whole buckets over one process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.core.errors import RankError
from zerograph.core.layout import Layout
from zerograph.core.plan import Param
from zerograph.runtime.buffers import Full, allocate_full, dtype_name, torch_dtype
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, describe_difference, reason_of, sequence_of
from zerograph.runtime.comm.packing import gradient_message, means, padded_shards
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.comm.waiting import BegunWait
from zerograph.runtime.comm.wires import Terms, parts_of, spread
from zerograph.runtime.own_stream import OwnStream, Wait
from zerograph.runtime.torch_private import backend_name, coalescing, gloo_group, group_among, is_registered

# Renamed in torch 2.13, which warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def together(comm: Communicator, entry: Entry, compared: bool = False) -> Iterator[None]:
    """Enter and leave around the collectives of a block; an error in it is one on all ranks. ``compared`` as for
    ``enter``."""
    try:
        comm.enter(entry, compared=compared)
        yield
        comm.leave()
    except BaseException as error:
        comm.abort(reason_of(error))
        raise


def sum_over_ranks(comm: Communicator, value: Tensor, program: str, names: Iterable[str] = ()) -> Tensor:
    """Sum over the ranks of a number, or of each of several in a vector of one length on all of them, who all call
    this: a ``program`` of its own, so they hear of one that failed.

    Every rank adds up all values in the order of ranks, in float64, so all have the same sum. Ranks compare the
    ``names`` of several.
    """
    name = f"a number of the {program}"
    with together(comm, Entry(program, sequence_of([name, *names]), comm.steps)):
        return of_all_ranks(comm, name, value.double()).sum(0)


def of_all_ranks(comm: Communicator, name: str, value: Tensor) -> Tensor:
    """The ``value`` of each rank, who all call this inside of one program: ``[ranks, *value.shape]``."""
    dtype, shape = dtype_name(value.dtype), (comm.world_size, *value.shape)
    param = Param(name, shape, dtype, dtype, dtype, False, Layout("rows", comm.world_size))
    (found,) = comm.finish_gather(comm.start_gather([param], [value.unsqueeze(0)]))
    return found


class _PendingCast(NamedTuple):
    params: Sequence[Param]
    shards: Sequence[Tensor]
    behind: Sequence[Wait] = ()


def _cast(params: Sequence[Param], shards: Sequence[Tensor]) -> list[Tensor]:
    return [s.detach().to(torch_dtype(p.compute_dtype)).contiguous() for p, s in zip(params, shards, strict=True)]


class LoneCommunicator(Communicator):
    """The transport of a lone rank: its shards are whole, so that a gather casts them at most."""

    name, rank, world_size, steps = "no communication", 0, 1, 0

    def rejoin(self) -> None:
        """There is nobody."""

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """There is nobody to agree with."""
        self.steps = entry.steps

    def leave(self) -> None:
        """There is nobody to wait for."""

    def start_gather(
        self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
    ) -> _PendingCast:
        return _PendingCast(params, shards, behind) if behind else _PendingCast(params, _cast(params, shards))

    def finish_gather(self, pending: _PendingCast) -> list[Tensor]:
        if not pending.behind:
            return list(pending.shards)
        for wait in pending.behind:
            wait()
        return _cast(pending.params, pending.shards)

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> list[Tensor]:
        return [
            grad.to(torch_dtype(p.reduce_dtype)).to(torch_dtype(p.dtype)) for p, grad in zip(params, grads, strict=True)
        ]

    def finish_reduce(self, pending: list[Tensor]) -> list[Tensor]:
        return pending

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        return list(sends)

    def finish_exchange(self, pending: list[Tensor]) -> list[Tensor]:
        return pending

    def abort(self, reason: str) -> None:
        """There is nobody to tell."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A collective under way, as its work, or the event at its end in a stream of ours; without it once that was waited
    for, or was given up.

    Nothing else may hold the work: tracebacks of caught errors keep local variables.
    """

    work: dist.Work | torch.Event | None


@dataclass(slots=True)
class _PendingGather:
    full: Full
    work: _Flight
    alive: list[Tensor]  # that the collective reads
    received: Tensor | None = None  # messages that are still to be copied out


@dataclass(slots=True)
class _PendingReduce:
    params: Sequence[Param]
    results: list[Tensor]
    works: list[_Flight]
    alive: list[Tensor]
    exchanged: tuple[list[int], Terms, _PendingExchange] | None = None  # of those that ranks send each other parts of


@dataclass(slots=True)
class _PendingExchange:
    received: Tensor
    sizes: list[int]
    work: _Flight
    alive: Tensor


class GroupCommunicator(Communicator):
    """Collectives of ``torch.distributed``: NCCL, gloo, or any other backend.

    On NCCL the all-gathers of a bucket are coalesced into one launch and write straight into the full parameters;
    elsewhere a bucket travels as one flat message and is copied out. Sharded gradients on gloo between CPUs, and those
    that are sent in fewer bits, are exchanged and summed by the ranks themselves, in their order. On an accelerator
    gathers and reductions have a stream each. NCCL runs the collectives of one group one after the other all the
    same, so reductions get a second group: they overlap gathers as well as compute. Backends of the same ranks share
    it.

    After an error on gloo ranks go on with new connections: what was begun on the old ones and never finished would
    else meet later messages. They are ZeroGraph's own from the start, so the user's group is as it was.

    On NCCL an operation in flight cannot be taken back, and comparing would wait for the device. Ranks that all raise
    at the same instruction have enqueued the same operations, and go on as if nothing was. A rank cannot know that of
    the others, so after an error the next program begins when all have published, in the store, how many operations
    they have enqueued; if these differ, every rank that failed raises, then and at every later program. A rank that
    did not fail waits on its device, which NCCL's own watchdog ends after the group's timeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        rendezvous: Rendezvous | None = None,
        ranks: Sequence[int] | None = None,
        gathers: bool = True,
    ) -> None:
        """``ranks`` are those of ``group`` as ``rendezvous`` numbers them, the same numbers unless given; on gloo they
        may be some of them. Without ``gathers`` there is nothing that reductions overlap."""
        self.group, self.device, self.rendezvous = group, device, rendezvous
        self.ranks = range(group.size()) if ranks is None else ranks
        self._lost = ""  # why this rank can never meet the others again
        self._doing, self.steps = "", 0
        self._flying: set[_Flight] = set()
        self._connected = 0  # the generation of the connections
        transport = backend_name(group, device)
        self.name = f"torch.distributed ({transport})"
        self.rank = group.rank() if ranks is None or rendezvous is None else ranks.index(rendezvous.rank)
        self.world_size = len(self.ranks)
        self.coalesces = transport == "nccl"
        self.compares = rendezvous is not None and transport == "gloo"
        has_streams = device.type != "cpu" and transport != "gloo"
        self._gathers, self._reductions = (OwnStream(device) if has_streams else None for _ in range(2))
        two = has_streams and gathers and group.size() > 1
        self.reduce_group = group
        if two:
            self.reduce_group = _reduce_group(group, device, transport)
        if self.compares:
            self._connect()

    def _connect(self) -> None:
        """Connections between the ranks for this generation."""
        assert self.rendezvous is not None
        self._connected = self.rendezvous.generation  # even if it fails: nobody connects twice in a generation
        # No two rows and columns of a grid begin and end alike.
        place = f"gloo/{self.rendezvous.generation}/{self.ranks[0]}-{self.ranks[-1]}"
        store = dist.PrefixStore(place, self.rendezvous.store.raw)
        timeout = timedelta(seconds=self.rendezvous.timeout)
        self.group = self.reduce_group = gloo_group(store, self.rank, self.world_size, timeout, self.device)

    def enter(self, entry: Entry, *, compared: bool = False) -> None:
        """Compare with the other ranks, on gloo; on NCCL that would wait for the device. See :class:`Communicator`."""
        self.rejoin()
        self.steps = entry.steps
        if self.rendezvous is None or not (self.compares or compared):
            return
        self._doing = f"in the {entry.program}"
        self.rendezvous.programs += 1
        device = torch.device("cpu") if self.compares else self.device
        everyone = torch.empty(self.world_size, 2, dtype=torch.int64, device=device)
        mine = torch.tensor([[entry.sequence, entry.steps]], device=device)
        self._wait(self._launch(self._gathers, _all_gather, everyone, mine, group=self.group))
        found = everyone.tolist()
        if all(theirs == found[self.rank] for theirs in found):
            return
        entries = self._gather("entered", entry.to_json(), self.ranks)
        rank, other = next((r, e) for r, text in entries.items() if (e := Entry.from_json(text)) != entry)
        raise describe_difference(entry, rank, other, self.rendezvous.rank)

    def _gather(self, key: str, mine: str, ranks: Iterable[int]) -> dict[int, str]:
        """The texts of ``ranks`` under ``key``, after an exchange that they all have seen differ."""
        assert self.rendezvous is not None
        name = f"{self.generation}/{key}"
        self.rendezvous.store.set(f"{name}/{self.rendezvous.rank}", mine)
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        self.rendezvous.wait(keys, "to learn what other ranks run", heed=False)
        return {rank: self.rendezvous.store.get(key) for rank, key in keys.items()}

    def rejoin(self) -> None:
        rendezvous = self.rendezvous
        if rendezvous is None:
            return
        if rendezvous.failed:
            self._meet(rendezvous)
        self._follow(rendezvous)

    def _follow(self, rendezvous: Rendezvous) -> None:
        """Connect in the rendezvous's generation, which a Ctrl-C after ranks met may have kept this one from."""
        if self.compares and self._connected != rendezvous.generation:
            # Closes the old connections on the ranks that have begun least, which ends what the others still wait for.
            # A work keeps them open, and tracebacks of caught errors keep everything else.
            for flight in self._flying:
                flight.work = None
            self._flying.clear()
            self._connect()

    def _meet(self, rendezvous: Rendezvous) -> None:
        if self._lost:
            raise RankError(self._lost, "start all ranks again from a checkpoint")
        if not self.compares:
            mine = f"{rendezvous.collectives} collectives begun, {self.steps} optimizer steps taken"
            found = self._gather("enqueued", mine, range(rendezvous.world_size))
            if len(set(found.values())) > 1:
                places = "; ".join(f"rank {rank}: {place}" for rank, place in found.items())
                self._lost = f"ranks failed at different places and cannot go on together ({places})"
                raise RankError(self._lost, "start all ranks again from a checkpoint")
        rendezvous.meet()

    def leave(self) -> None:
        """See :class:`Communicator`; on NCCL that would wait for the device."""
        if self.compares:
            everyone = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
            mine = torch.zeros(1, dtype=torch.int64, device="cpu")
            self._wait(self._launch(None, _all_gather, everyone, mine, group=self.group))

    def _launch(
        self, stream: OwnStream | None, collective: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup
    ) -> _Flight:
        """Begin a collective in ``stream``, or where there is none in the time of its group."""
        if stream is None:
            return self._fly(collective(*tensors, group=group, async_op=True))
        with stream.behind():
            collective(*tensors, group=group)
            return self._fly(stream.end())

    def _fly(self, work: dist.Work | torch.Event) -> _Flight:
        """Keep a collective that was launched. It counts from here on: whoever has no memory for its message is one
        behind a rank that launched it and then fails."""
        if self.rendezvous is not None:
            self.rendezvous.collectives += 1
        flight = _Flight(work)
        self._flying.add(flight)
        return flight

    def _wait(self, flight: _Flight) -> None:
        """Wait for a collective, and on gloo see meanwhile whether a rank failed."""
        assert flight.work is not None
        if isinstance(flight.work, torch.Event):
            torch.accelerator.current_stream(self.device).wait_event(flight.work)
        elif not self.compares:
            flight.work.wait()
        else:
            assert self.rendezvous is not None
            # gloo does not say which ranks have not come.
            others = [rank for rank in self.ranks if rank != self.rendezvous.rank]
            with BegunWait(self.rendezvous, self._doing, lambda: others) as wait:
                while not self._ends_soon(flight):
                    wait.look()
        self._flying.discard(flight)
        flight.work = None

    def _ends_soon(self, flight: _Flight) -> bool:
        assert isinstance(flight.work, dist.Work)
        try:
            flight.work.wait(_SLICE)
        except RuntimeError as error:
            # The slice of time is over. gloo raises for that as for a lost connection, but then the work has not ended.
            if not flight.work.is_completed():
                return False
            assert self.rendezvous is not None
            raise self.rendezvous.disconnected(self._doing, str(error).partition("\n")[0]) from error
        return True

    def start_gather(
        self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
    ) -> _PendingGather:
        full = allocate_full(params, self.device)
        if self._gathers is None:
            received, flat = self._messages(padded_shards(params, shards, self.device), full)
            flight = self._launch(None, _all_gather, received, flat, group=self.group)
            return _PendingGather(full, flight, [flat], received)
        with self._gathers.behind(behind):
            # What is made here has memory of this stream, and goes back to it.
            sends = padded_shards(params, shards, self.device)
            if self.coalesces:
                with coalescing(self.group):
                    for out, send in zip(full.padded, sends, strict=True):
                        _all_gather(out, send, group=self.group)
            else:
                received, flat = self._messages(sends, full)
                _all_gather(received, flat, group=self.group)
                self._copy_out(received, full)
            return _PendingGather(full, self._fly(self._gathers.end()), [*sends, *shards])

    def _messages(self, sends: Sequence[Tensor], full: Full) -> tuple[Tensor, Tensor]:
        """Memory for the messages of all ranks, and this one's: as bytes, since the parameters of a bucket may have
        several dtypes, and travel in one. Those of one parameter lie as it does."""
        flat = torch.cat([s.view(torch.uint8) for s in sends])
        if len(sends) == 1:
            return full.padded[0].view(torch.uint8), flat
        return flat.new_empty(self.world_size * flat.numel()), flat

    def _copy_out(self, received: Tensor, full: Full) -> None:
        if len(full.padded) == 1:
            return
        by_rank, offset = received.view(self.world_size, -1), 0
        for padded in full.padded:
            out = padded.view(torch.uint8).view(self.world_size, -1)
            out.copy_(by_rank[:, offset : offset + out.shape[1]])
            offset += out.shape[1]

    def finish_gather(self, pending: _PendingGather) -> list[Tensor]:
        self._wait(pending.work)
        if pending.received is not None:
            self._copy_out(pending.received, pending.full)
        return pending.full.tensors

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> _PendingReduce:
        results: list[Tensor] = [None] * len(params)  # type: ignore[list-item]
        # One message for each dtype and kind, in the order in which parameters stand: the same on all ranks.
        works, alive = [], []
        exchanged = [i for i, p in enumerate(params) if self._exchanges(p)]
        others = [(i, p) for i, p in enumerate(params) if not self._exchanges(p)]
        for dtype, reduction in dict.fromkeys((p.reduce_dtype, p.reduction) for _, p in others):
            members = [i for i, p in others if (p.reduce_dtype, p.reduction) == (dtype, reduction)]
            chosen = [params[i] for i in members]
            run = self._reduce_scatter if reduction == "reduce-scatter" else self._all_reduce
            parts, flight, send = run(chosen, [grads[i] for i in members], torch_dtype(dtype))
            works.append(flight)
            alive.append(send)
            for i, part in zip(members, parts, strict=True):
                results[i] = part
        pending = _PendingReduce(params, results, works, alive)
        if exchanged:
            begun = self._exchange_terms([params[i] for i in exchanged], [grads[i] for i in exchanged])
            pending.exchanged = (exchanged, *begun)
        return pending

    def _exchanges(self, param: Param) -> bool:
        """Whether ranks send each other their parts of the gradient, and sum these in the order of ranks: in fewer
        bits, and over gloo between CPUs, which makes an all-reduce of a reduce-scatter, in twice the bytes."""
        return param.reduce_wire is not None or (self.compares and self.device.type == "cpu" and param.sharded)

    def _exchange_terms(self, params: Sequence[Param], grads: Sequence[Tensor]) -> tuple[Terms, _PendingExchange]:
        terms = Terms(params)
        messages = terms.messages(self.world_size, self.device)
        for which, (p, grad) in enumerate(zip(params, grads, strict=True)):
            terms.write(messages, which, parts_of(grad.to(self.device), self.world_size, p.summed_elements))
        sizes = [terms.bytes] * self.world_size
        return terms, self._exchange(messages.view(-1), sizes, sizes, self._reductions, self.reduce_group)

    def _reduce_scatter(
        self, params: Sequence[Param], grads: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], _Flight, Tensor]:
        lengths = [p.chunk_elements for p in params]
        send = gradient_message(params, grads, dtype, self.device)
        if self.compares:  # as gloo does by itself, and then its wait has no timeout
            out = send[self.rank]
            flight = self._launch(None, dist.all_reduce, send, group=self.reduce_group)
        else:
            out = send.new_empty(sum(lengths))
            flight = self._launch(self._reductions, _reduce_scatter, out, send.view(-1), group=self.reduce_group)
        parts = [part[: prod(p.shard_shape(self.rank))] for p, part in zip(params, out.split(lengths), strict=True)]
        return parts, flight, send

    def _all_reduce(
        self, params: Sequence[Param], grads: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], _Flight, Tensor]:
        (flat,) = gradient_message(params, grads, dtype, self.device)
        flight = self._launch(self._reductions, dist.all_reduce, flat, group=self.reduce_group)
        return list(flat.split([p.elements for p in params])), flight, flat

    def finish_reduce(self, pending: _PendingReduce) -> list[Tensor]:
        for work in pending.works:
            self._wait(work)
        others = [i for i, p in enumerate(pending.params) if not self._exchanges(p)]
        sums, dtypes = [pending.results[i] for i in others], [torch_dtype(pending.params[i].dtype) for i in others]
        for i, mean in zip(others, means(sums, self.world_size, dtypes), strict=True):
            pending.results[i] = mean.view(pending.params[i].shard_shape(self.rank))
        if pending.exchanged is not None:
            exchanged, terms, exchange = pending.exchanged
            self._wait(exchange.work)
            found = terms.sums(exchange.received.view(self.world_size, -1), self.rank, 1.0 / self.world_size)
            for i, mean in zip(exchanged, spread(self, terms.params, found, self.rank), strict=True):
                pending.results[i] = mean
        return pending.results

    def start_exchange(self, sends: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> _PendingExchange:
        flat = torch.cat([send.to(self.device) for send in sends])
        coming = [own[self.rank] for own in sizes]
        return self._exchange(flat, list(sizes[self.rank]), coming, self._gathers, self.group)

    def _exchange(
        self, flat: Tensor, going: list[int], coming: list[int], stream: OwnStream | None, group: dist.ProcessGroup
    ) -> _PendingExchange:
        received = flat.new_empty(sum(coming))
        exchange = partial(dist.all_to_all_single, output_split_sizes=coming, input_split_sizes=going)
        return _PendingExchange(received, coming, self._launch(stream, exchange, received, flat, group=group), flat)

    def finish_exchange(self, pending: _PendingExchange) -> list[Tensor]:
        self._wait(pending.work)
        return list(pending.received.split(pending.sizes))

    def abort(self, reason: str) -> None:
        if self.rendezvous is not None:
            try:
                self._follow(self.rendezvous)  # the others wait for this rank to connect, and hear nothing meanwhile
            finally:
                self.rendezvous.fail(reason)
        if not self.compares:
            self._land()

    def _land(self) -> None:
        """Let the device's stream wait for what is in flight: the caller frees its memory, in the stream's order."""
        for flight in list(self._flying):
            with contextlib.suppress(RuntimeError):  # the first error is on its way to the caller
                self._wait(flight)
        self._flying.clear()


def _reduce_group(group: dist.ProcessGroup, device: torch.device, transport: str) -> dist.ProcessGroup:
    """The second group of the ranks of ``group``, who all call this."""
    ranks = tuple(dist.get_process_group_ranks(group))
    found = _REDUCE_GROUPS.get((ranks, device, transport))
    if found is None or not is_registered(found):  # the user may have destroyed all groups
        found = _REDUCE_GROUPS[ranks, device, transport] = group_among(ranks, group, device, "zerograph-reduce")
    return found


_REDUCE_GROUPS: dict[tuple[tuple[int, ...], torch.device, str], dist.ProcessGroup] = {}
# Of all backends: a communicator of NCCL's has its memory on the device until the group is destroyed, and a process may
# train a hundred models.

_SLICE = timedelta(seconds=0.5)
"""How long to wait for gloo before looking whether a rank failed."""
