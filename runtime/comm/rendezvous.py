"""How ranks notice that one of them failed, and how they meet again.

*State.* Ranks work in a generation, a number that starts at 0. Each rank knows its generation and whether that has
ended, because it failed itself or saw that another did. Messages and pending transfers in flight belong to the
generation; gathered parameters that stay resident between programs do too.

*A program ends on all ranks, or on none.* ``enter`` tells the others which program begins and how many optimizer steps
this rank has taken; ``leave`` waits until all ranks have come to the program's end. Every program with collectives
stands between the two. So when a program raises on one rank, no rank gets past it: it raises on all that run it, and
what it had changed on each (held gradients) is put back. No rank has gradients that others lack, and none can step.

*Failing.* A rank that raises inside a program, in the step of an optimizer, or while it compiles a program, ends its
generation: it writes why under the generation's key of the group's store, and the transport tells ranks that wait (a
word in shared memory; or they look at that key twice a second). Who sees this raises :class:`RankError` with the first
rank's name and error, and ends the generation as well. So all ranks end it, each at the latest when it next enters a
program: there is no other way on. A rank whose connection closes writes so instead, and ranks find out together who
does not answer any more: that one is lost, and the one that saw it first did not fail. Beside tensor parallelism ranks
also wait in collectives inside of segments, which look at nothing: who knows that the generation ended hangs up first,
which closes the connections that these wait for (:class:`~zerograph.runtime.comm.paired.OwnConnections`).

*Rendezvous.* The next ``enter`` of such a rank, or the next program it compiles, first says that it is here, and waits
until all are. Then no rank works in the old generation any more, and none can begin to; each drops what it had in
flight, and the next generation begins: message numbers, or the connections of a process group, are new ones, so nothing
late can be taken for a message of now. Each rank deletes the keys it set in the old one.
Arriving is a key that stays. A rank that is interrupted while it waits, arrives again without harm; others may go on
meanwhile, and wait for it in the first collective.

*Errors without recovery.* Ranks that wait for each other at different places (one skips a batch without an error, one
runs a program alone) differ in what they enter, which is compared on every rank, and raises on all. Different numbers
of optimizer steps raise at every program from then on, as shards are of different ages. A rank that never comes is
waited for as long as the process group's ``timeout`` says (:mod:`~zerograph.runtime.comm.waiting`). Ranks report when
they compile, fail, leave, or wait for long.

On NCCL the host runs ahead of the device, so programs are neither compared nor waited for at their ends, and what was
enqueued cannot be taken back: see :class:`~zerograph.runtime.comm.collectives.GroupCommunicator`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerograph.runtime.comm.peers import NOTICE, POLL, Peers
from zerograph.runtime.comm.roster import Process, Roster
from zerograph.runtime.comm.store_client import StoreLost
from zerograph.runtime.comm.waiting import BegunWait
from zerograph.runtime.torch_private import default_store, timeout_of

log = logging.getLogger(__name__)
T = TypeVar("T")


class Rendezvous(Peers):
    """How the ranks of one backend wait for each other, and go on after an error."""

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device) -> Rendezvous:
        """A rendezvous of the ranks of ``group``, who all call this."""
        gathered = shared(group, (uuid.uuid4().hex, Process.here()))
        roster = Roster([process for _, process in gathered])
        return cls(default_store(), gathered[0][0], group.rank(), group.size(), timeout_of(group, device), roster)

    def meet(self) -> None:
        """Wait until all ranks have ended this generation and are about to enter a program; begin the next one.

        Raises:
            RankError: one does not come.
        """
        following, ended = self.generation + 1, self.generation
        self.store.delete(self.void)
        self.void.clear()
        self.store.set(f"{following}/here/{self.rank}", "")
        keys = {rank: f"{following}/here/{rank}" for rank in range(self.world_size)}
        self.wait(keys, "to go on after an error, at the start of a program", heed=False)
        self.generation, self.failed, self.programs = following, False, 0
        # Whoever is here reads no key of the generation before.
        self.store.delete([f"{ended}/{name}/{self.rank}" for name in ("here", "entered", "enqueued", "replies")])
        if self.rank == 0:
            self.store.delete([f"{ended}/{name}" for name in ("ended", "waits", "silent")])
        log.info("rank %d: all ranks go on after an error", self.rank)

    def wait(self, keys: Mapping[int, str], doing: str, question: str = "", *, heed: bool = True) -> None:
        """Wait until every rank of ``keys`` has set its key.

        Args:
            keys: by rank.
            doing: what this rank waits for, as in "rank 1 waits ...".
            question: what the keys answer; ranks that wait for answers to different ones wait in vain.
            heed: whether a rank that failed ends the wait.

        Raises:
            RankError: a rank failed, left, or did not come in time.
            CollectiveMismatch: another rank waits for this one, at another place.
        """
        missing, pause = list(keys), POLL / 32  # short pauses first, as ranks usually come within milliseconds

        def still_missing() -> list[int]:
            missing[:] = [rank for rank in missing if not self.store.has(keys[rank])]
            return missing

        with BegunWait(self, doing, still_missing, question=question or doing, heed=heed) as wait:
            while True:
                # One rank at a time: each question is a message to the store's server, which serves all ranks.
                while missing and self.store.has(keys[missing[0]]):
                    missing.pop(0)
                if not missing:
                    return
                wait.look()
                time.sleep(pause)
                pause = min(POLL, 2 * pause)

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Inside, this rank compiles ``what``; the others wait for it as long as it does."""
        self.report(f"compiles {what}")
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(weakref.ref(self), ended, self.beat_every), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
        self.report(f"compiled {what}")


def _beat(rendezvous: weakref.ref[Rendezvous], ended: threading.Event, every: float) -> None:
    """Count on that others see this rank alive, while it does not itself wait for them."""
    while not ended.wait(every):
        live = rendezvous()
        if live is None:
            return
        if not live.waits:
            try:
                live.store.count("beats", 1)
            except StoreLost as error:
                log.warning("rank %d cannot tell the others that it compiles: %s", live.rank, error)
                return
        del live


@contextlib.contextmanager
def noticed(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Logs a warning when the block, which waits in collectives of torch's own, takes longer than :data:`NOTICE`.

    It starts a thread: not for what every step does.
    """
    if group is None or group.size() == 1:
        yield
        return
    text = f"rank {group.rank()} has waited {NOTICE:.0f} s {doing}; this goes on when all ranks do it"
    timer = threading.Timer(NOTICE, log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shared(group: dist.ProcessGroup, value: T) -> list[T]:
    """``value`` of every rank of ``group``, by rank; all call this."""
    values: list[Any] = [None] * group.size()
    with noticed(group, "at the first call of a compiled model, in zerograph.shard() or in once_per_step()"):
        dist.all_gather_object(values, value, group=group)
    return values
