"""Connections between the stages of a pipeline that end where a rank raises, as those of the user's group do not.

A rank of ``torch.distributed.pipelining`` waits for its neighbours in sends and receives of the group that its stages
were given. Over gloo nothing but the end of a process ends such a wait, and one with a timeout closes the whole group,
so that no rank can look about meanwhile. Here a rank that raises closes connections of ours, which ends the waits of
its neighbours. These close theirs, so that it runs along the pipeline. Before the next step all meet and connect anew:
nothing late is taken for a message of then.

Gloo closes a connection with its last user, and each transfer that has not ended is one. torch keeps them in schedules,
and tracebacks of caught errors do. So torch gets transfers of ours, and who hangs up drops what they hold.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph.core.errors import CollectiveMismatch
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.torch_private import closed_connection, gloo_group


class Neighbours:
    """The ranks along a pipeline, for sends and receives of ``torch.distributed.P2POp``, which takes them as a group.

    Attributes:
        rendezvous: how they meet after an error.
        group_name: of the user's group, by which schedules of torch 2.14 put sends and receives together.
        takes_steps: whether this rank's stage has shown that it takes optimizer steps.
        stopped: whether one of these has failed on this rank since the last step of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks of ``group``, the user's, call this, and have connected when it returns; on ``device`` are the
        tensors that they send."""
        self.rendezvous, self._device = Rendezvous.open(group, device), device
        self.group_name = group.group_name
        ranks = dist.get_process_group_ranks(group)
        self._doing = (
            f"in a step of the pipeline over ranks {str(ranks[:8])[1:-1]}{', ...' * (len(ranks) > 8)} of the job"
        )
        self._open: list[dist.ProcessGroup] = []  # one while it is connected; nobody else holds it
        self._transfers = weakref.WeakSet[_Transfer]()
        self.rendezvous.hang_up = partial(_hang_up, self._open, self._transfers)
        self._connected, self._stepped, self._met, self.takes_steps, self.stopped = -1, 0, 0, False, False
        self._follow()
        self.total([0])  # none goes on, and perhaps fails and hangs up, while another still connects

    def begin(self) -> None:
        """A step of the pipeline begins, after an error once it does on all ranks.

        Raises:
            RankError: another rank does not come.
        """
        if self.rendezvous.failed:
            self.rendezvous.meet()
        self._follow()

    def end(self, steps: int, trains: bool, met: int) -> None:
        """Wait until all ranks have come to the end of a step: none goes on to the optimizer where another raises.

        Args:
            steps: of optimizers that this rank has taken.
            trains: whether it has parameters for them.
            met: how often the ranks of its stage have met after an error.

        Raises:
            RankError: another rank failed.
            CollectiveMismatch: an error kept some stages from an optimizer step that others have taken.
        """
        took, met = steps != self._stepped, met + self.rendezvous.generation
        late = trains and not took and self.takes_steps  # not a stage that no optimizer holds
        stepped, waiting, failed = self.total([trains and took, late, met != self._met])
        if stepped and waiting and failed:  # without an error before, stages may step as they like
            raise CollectiveMismatch(
                f"after an error {stepped} ranks of the pipeline have taken an optimizer step that "
                f"{waiting} have not: stages are of different ages",
                "load a checkpoint on all ranks, and let all catch the same errors around the schedule's step alone",
            )  # and again in each step: the next one finds what this one did, until a checkpoint is loaded
        self._stepped, self._met, self.takes_steps = steps, met, self.takes_steps or took

    def total(self, numbers: list[int]) -> list[int]:
        """``numbers`` added up over all ranks, who all call this.

        Raises:
            RankError: another rank failed.
        """
        counts = torch.tensor(numbers, dtype=torch.int32, device="cpu")  # whatever the user's default device is
        self.add_up(counts)
        sums: list[int] = counts.tolist()
        return sums

    def add_up(self, numbers: Tensor) -> None:
        """As :meth:`total`, in place."""
        self._begin("allreduce", [numbers]).wait()

    def fail(self, reason: str) -> None:
        """This rank failed: end what others wait for, and meet them at the next step."""
        self.stopped = False
        try:
            self._follow()  # they wait for this rank to connect, and hear nothing meanwhile
        finally:
            self.rendezvous.fail(reason)

    def stop(self, reason: str) -> None:
        """An optimizer's step failed on this rank: others may wait for its norm. They hear of it there, or in the next
        step of the pipeline, which this rank is not to begin: else it would meet them a step later than they come."""
        outside = self.stopped or not self.rendezvous.failed
        try:
            self.fail(reason)
        finally:
            self.stopped = outside

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Transfer:
        """As of a process group."""
        return self._begin("send", tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Transfer:
        """As of a process group."""
        return self._begin("recv", tensors, rank, tag)

    def lost(self, error: RuntimeError) -> BaseException:
        """The error to raise where a transfer ended with ``error``.

        Raises:
            RankError: it did because another rank failed, which the message names.
        """
        self.rendezvous.check(self._doing)
        closed = closed_connection(error)
        return self.rendezvous.disconnected(self._doing, closed) if closed else error

    def _begin(self, verb: str, *message: Any) -> _Transfer:
        if not self._open:
            raise self.lost(RuntimeError("this rank has hung up"))
        try:
            # No name for the group or its work: tracebacks keep those.
            transfer = _Transfer(getattr(self._open[0], verb)(*message), self)
        except RuntimeError as error:
            raise self.lost(error) from None
        self._transfers.add(transfer)
        return transfer

    def _follow(self) -> None:
        """Connect in the rendezvous's generation, unless that was done, or tried."""
        rendezvous = self.rendezvous
        if self._connected == rendezvous.generation:
            return
        self._connected = rendezvous.generation
        _hang_up(self._open, self._transfers)
        store, timeout = rendezvous.store.raw, timedelta(seconds=rendezvous.timeout)
        place = dist.PrefixStore(f"pipeline/{rendezvous.generation}", store)
        try:
            self._open.append(gloo_group(place, rendezvous.rank, rendezvous.world_size, timeout, self._device, timeout))
        except RuntimeError as error:  # another has connected, and hung up
            raise self.lost(error) from None


class _Transfer:
    """A send or receive, as torch waits for it."""

    def __init__(self, work: dist.Work, neighbours: Neighbours) -> None:
        self.work: dist.Work | None = work
        self._neighbours, self._ended = neighbours, False

    def wait(self) -> bool:
        """Wait until it has ended.

        Raises:
            RankError: another rank failed, or its connection closed.
        """
        if self._ended:
            return True
        try:
            if self.work is None:
                raise RuntimeError("this rank has hung up")
            self.work.wait()
        except RuntimeError as error:
            raise self._neighbours.lost(error) from None
        self.work, self._ended = None, True
        return True


def _hang_up(connected: list[dist.ProcessGroup], transfers: weakref.WeakSet[_Transfer]) -> None:
    for transfer in list(transfers):
        transfer.work = None
    transfers.clear()
    connected.clear()  # a group closes with its object
