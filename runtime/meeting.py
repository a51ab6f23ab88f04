"""How ranks notice that one of them failed, and how they meet again.

*State.* Ranks work in a generation, a number that starts at 0. Each rank knows its generation and whether that has
ended, because it failed itself or saw that another did. What is in flight (messages, pending transfers) belongs to the
generation; gathered parameters that stay whole between programs do too.

*A program ends on all ranks, or on none.* ``enter`` tells the others which program begins and how many optimizer steps
this rank has taken; ``leave`` waits until all ranks have come to the program's end. Every program with collectives
stands between the two. So when a program raises on one rank, no rank gets past it: it raises on all that run it, and
what it had changed on each (held gradients) is put back. No rank has gradients that others lack, and none can step.

*Failing.* A rank that raises inside a program, or while it compiles one, ends its generation: it writes why under the
generation's key of the group's store, and the transport tells ranks that wait (a word in shared memory; or they look at
that key twice a second). Who sees this raises :class:`RankError` with the first rank's name and error, and ends the
generation as well. So all ranks end it, each at the latest when it next enters a program: there is no other way on.

*Meeting.* The next ``enter`` of such a rank, or the next program it compiles, first says that it is here, and waits
until all are. Then no rank works in the old generation any more, and none can begin to; each drops what it had in
flight, and the next generation begins: message numbers, or the connections of a process group, are new ones, so nothing
late can be taken for a message of now.
Arriving is a key that stays. A rank that is interrupted while it waits, arrives again without harm; others may go on
meanwhile, and wait for it in the first collective.

*What cannot be saved.* Ranks that wait for each other at different places (one skips a batch without an error, one
runs a program alone) differ in what they enter, which is compared on every rank, and raises on all. Different
numbers of optimizer steps raise at every program from then on, as shards are of different ages. A rank that never
comes is waited for as long as the process group's ``timeout`` says. After ten seconds the one who waits logs for what,
for whom, and what those ranks last reported; ranks report when they compile, fail, leave, or wait for long.

On NCCL the host runs ahead of the device, so programs are neither compared nor waited for at their ends, and what was
enqueued cannot be taken back: see :class:`~zerograph.runtime.comm.GroupCommunicator`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerograph.errors import RankError

log = logging.getLogger(__name__)
T = TypeVar("T")

NOTICE = 10.0
"""Seconds of waiting after which a rank says so."""

POLL = 0.05
"""Seconds between two looks at the store, which is a message to its server each."""


class Meeting:
    """What one rank knows of the others, for one backend.

    Attributes:
        timeout: seconds to wait for another rank, those of the process group.
        notice_after: seconds of waiting after which this rank says so.
        generation: counts the errors that ranks have recovered from.
        failed: whether the generation has ended for this rank.
        present: tells of a rank whether its process is there, as far as the transport knows.
    """

    def __init__(self, store: dist.Store, scope: str, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.generation, self.failed, self.notice_after = 0, False, NOTICE
        self.present: Callable[[int], bool] = lambda rank: True
        self.store = dist.PrefixStore(f"zerograph/{scope}", store)
        weakref.finalize(self, _leave, self.store, rank)

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device) -> Meeting:
        """A meeting of the ranks of ``group``, who all call this."""
        scope = shared(group, uuid.uuid4().hex)[0]
        store = dist.distributed_c10d._get_default_store()
        return cls(store, scope, group.rank(), group.size(), timeout_of(group, device))

    # ---- failing and meeting

    def fail(self, reason: str) -> None:
        """End the generation, on this rank and for all; ``reason`` is this rank's error. The first one counts."""
        if self.failed:
            return
        self.failed = True
        try:
            self.report(f"failed: {reason}")
            self.store.set(f"{self.generation}/failed/{self.rank}", reason)
            if not self.store.check([f"{self.generation}/failed"]):  # of two at once either may be named
                self.store.set(f"{self.generation}/failed", str(self.rank))
        except RuntimeError as error:  # the error that is on its way matters more
            log.warning("rank %d cannot tell the others that it failed: %s", self.rank, error)

    def check(self, doing: str, hint: str = "") -> None:
        """Look whether a rank has ended this generation.

        Raises:
            RankError: naming the first that did, and its error.
        """
        key = f"{self.generation}/failed"
        if not self.store.check([key]):
            return
        first = int(self.store.get(key))
        reason = self.store.get(f"{self.generation}/failed/{first}").decode()
        raise RankError(
            f"rank {self.rank} cannot go on {doing}: rank {first} failed: {reason}",
            hint or f"see the output of rank {first}; where all ranks catch their errors, the next program runs again",
        )

    def meet(self) -> None:
        """Wait until all ranks have ended this generation and are about to enter a program; begin the next one.

        Raises:
            RankError: one does not come.
        """
        following = self.generation + 1
        self.store.set(f"{following}/here/{self.rank}", "")
        keys = {rank: f"{following}/here/{rank}" for rank in range(self.world_size)}
        self.wait(keys, "to go on after an error, at the start of a program", heed=False)
        self.generation, self.failed = following, False
        log.info("rank %d: all ranks go on after an error", self.rank)

    # ---- waiting

    def wait(self, keys: Mapping[int, str], doing: str, hint: str = "", *, heed: bool = True) -> None:
        """Wait until every rank of ``keys`` has set its key.

        Args:
            keys: by rank.
            doing: what this rank waits for, as in "rank 1 waits ...".
            hint: for the error.
            heed: whether a rank that failed ends the wait.

        Raises:
            RankError: a rank failed, left, or did not come in time.
        """
        missing, start, noticed, pause = dict(keys), time.monotonic(), False, POLL / 32
        while True:
            missing = {rank: key for rank, key in missing.items() if not self.store.check([key])}
            if not missing:
                return
            if heed:
                self.check(f"waiting {doing}", hint)
            gone = [rank for rank in missing if not self._is_here(rank)]
            waited = time.monotonic() - start
            if gone or waited >= self.timeout:
                why = f"rank {gone[0]} ended" if gone else f"{_named(missing)} did not come within {self.timeout:.0f} s"
                raise RankError(
                    f"rank {self.rank} waited {doing}, and {why}; {self.reports(missing)}",
                    hint or f"look at the output of {_named(gone or missing)}",
                )
            if waited >= self.notice_after and not noticed:
                noticed = True
                self.notice(doing, list(missing), hint)
            time.sleep(pause)
            pause = min(POLL, 2 * pause)

    def patiently(
        self, wait: Callable[[float], None], doing: str, missing: Callable[[], Sequence[int]], hint: str = ""
    ) -> None:
        """``wait(seconds)``, which may be called again after its TimeoutError, with one notice on the way."""
        first = min(self.notice_after, self.timeout)
        try:
            wait(first)
        except TimeoutError:
            if first == self.timeout:
                raise
            self.notice(doing, missing(), hint)
            wait(self.timeout - first)

    def notice(self, doing: str, missing: Sequence[int] = (), hint: str = "") -> None:
        """Say that this rank has waited for long, here and to the others."""
        others = [rank for rank in missing or range(self.world_size) if rank != self.rank]
        log.warning(
            "rank %d has waited %.0f s %s, for %s, and will wait up to %.0f s; %s%s",
            self.rank,
            self.notice_after,
            doing,
            _named(others),
            self.timeout,
            self.reports(others),
            f"\n\nhint: {hint}" if hint else "",
        )
        self.report(f"waits {doing}")

    # ---- reports

    def report(self, text: str) -> None:
        """Let others know what this rank does, for when they wait for it. Costs a message: not for every step."""
        self.store.set(f"report/{self.rank}", f"{time.strftime('%H:%M:%S')} {text}")

    def reports(self, ranks: Sequence[int] | Mapping[int, str]) -> str:
        """What ``ranks`` last reported, a few of them."""
        told = [f"rank {rank} last reported: {self._reported(rank)}" for rank in list(ranks)[:4]]
        return "; ".join(told)

    def _reported(self, rank: int) -> str:
        key = f"report/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "nothing yet"

    def _is_here(self, rank: int) -> bool:
        return rank == self.rank or (self.present(rank) and not self.store.check([f"left/{rank}"]))


@contextlib.contextmanager
def noticed(what: str) -> Iterator[None]:
    """Logs a warning when the block, a collective of torch's own, takes longer than :data:`NOTICE`."""
    timer = threading.Timer(NOTICE, log.warning, (f"waiting for {NOTICE:.0f} s for all ranks {what}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shared(group: dist.ProcessGroup, value: T) -> list[T]:
    """``value`` of every rank of ``group``, by rank; all call this."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that collectives of ``group`` wait for another rank: ``init_process_group(timeout=...)``."""
    return float(group._get_backend(device).options._timeout.total_seconds())  # no public way to ask


def _leave(store: dist.Store, rank: int) -> None:
    try:
        store.set(f"left/{rank}", "")
    except RuntimeError as error:  # the store ends with rank 0, and then there is nobody to tell
        log.debug("rank %d leaves unnoticed: %s", rank, error)


def _named(ranks: Sequence[int] | Mapping[int, str]) -> str:
    listed = ", ".join(str(rank) for rank in list(ranks)[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
