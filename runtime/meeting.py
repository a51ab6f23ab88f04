"""How ranks notice that one of them failed, and how they meet again.

*State.* Ranks work in a generation, a number that starts at 0. Each rank knows its generation and whether that has
ended, because it failed itself or saw that another did. What is in flight (messages, pending transfers) belongs to the
generation; gathered parameters that stay whole between programs do too.

*A program ends on all ranks, or on none.* ``enter`` tells the others which program begins and how many optimizer steps
this rank has taken; ``leave`` waits until all ranks have come to the program's end. Every program with collectives
stands between the two. So when a program raises on one rank, no rank gets past it: it raises on all that run it, and
what it had changed on each (held gradients) is put back. No rank has gradients that others lack, and none can step.

*Failing.* A rank that raises inside a program, in the step of an optimizer, or while it compiles a program, ends its
generation: it writes why under the generation's key of the group's store, and the transport tells ranks that wait (a
word in shared memory; or they look at that key twice a second). Who sees this raises :class:`RankError` with the first
rank's name and error, and ends the generation as well. So all ranks end it, each at the latest when it next enters a
program: there is no other way on.

*Meeting.* The next ``enter`` of such a rank, or the next program it compiles, first says that it is here, and waits
until all are. Then no rank works in the old generation any more, and none can begin to; each drops what it had in
flight, and the next generation begins: message numbers, or the connections of a process group, are new ones, so nothing
late can be taken for a message of now. Each rank deletes the keys it set in the old one.
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
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerograph.core.errors import RankError
from zerograph.runtime.torch_private import default_store, timeout_of

log = logging.getLogger(__name__)
T = TypeVar("T")

NOTICE = 10.0
"""Seconds of waiting after which a rank says so."""

POLL = 0.05
"""Seconds between two looks at the store, which is a message to its server each."""

LOOK = 1.0
"""Seconds between two looks at which of many ranks are missing, a message for each of them."""


class StoreLost(RankError):
    """The store of the process group does not answer, as when the process that serves it has ended."""


class Meeting:
    """What one rank knows of the others, for one backend.

    Attributes:
        timeout: seconds to wait for another rank, those of the process group.
        notice_after: seconds of waiting after which this rank says so.
        generation: counts the errors that ranks have recovered from.
        failed: whether the generation has ended for this rank.
        void: keys of this rank that others may not read in the next generation; it deletes them before it meets.
        present: tells of a rank whether its process is there, as far as the transport knows.
    """

    def __init__(self, store: dist.Store, scope: str, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.generation, self.failed, self.notice_after = 0, False, NOTICE
        self.present: Callable[[int], bool] = lambda rank: True
        self.void: list[str] = []
        self.store = dist.PrefixStore(f"zerograph/{scope}", store)
        weakref.finalize(self, _leave, self.store, rank, os.getpid())

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device) -> Meeting:
        """A meeting of the ranks of ``group``, who all call this."""
        scope = shared(group, uuid.uuid4().hex)[0]
        store = default_store()
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
            StoreLost: nobody can say.
        """
        key = f"{self.generation}/failed"
        if not self._has(key):
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
        following, ended = self.generation + 1, self.generation
        self._delete(self.void)
        self.void.clear()
        self._ask(self.store.set, f"{following}/here/{self.rank}", "")
        keys = {rank: f"{following}/here/{rank}" for rank in range(self.world_size)}
        self.wait(keys, "to go on after an error, at the start of a program", heed=False)
        self.generation, self.failed = following, False
        # Whoever is here reads no key of the generation before.
        self._delete([f"{ended}/{name}/{self.rank}" for name in ("here", "failed", "entered", "enqueued")])
        if self.rank == 0:
            self._delete([f"{ended}/failed"])
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
        # Short pauses first, as ranks usually come within milliseconds of each other.
        missing, start, noticed, pause, look = list(keys), time.monotonic(), False, POLL / 32, 0.0
        while True:
            # One rank at a time: each question is a message to the store's server, which serves all ranks.
            while missing and self._has(keys[missing[0]]):
                missing.pop(0)
            if not missing:
                return
            if heed:
                self.check(f"waiting {doing}", hint)
            gone, waited = [], time.monotonic() - start
            if waited >= min(look, self.timeout) or (waited >= self.notice_after and not noticed):
                look = waited + LOOK
                missing = [rank for rank in missing if not self._has(keys[rank])]
                gone = [rank for rank in missing if not self._is_here(rank)]
            if missing and (gone or waited >= self.timeout):
                why = f"rank {gone[0]} ended" if gone else f"{named(missing)} did not come within {self.timeout:.0f} s"
                raise RankError(
                    f"rank {self.rank} waited {doing}, and {why}; {self.reports(missing)}",
                    hint or f"look at the output of {named(gone or missing)}",
                )
            if missing and waited >= self.notice_after and not noticed:
                noticed = True
                self.notice(doing, missing, hint)
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
            named(others),
            self.timeout,
            self.reports(others),
            f"\n\nhint: {hint}" if hint else "",
        )
        self.report(f"waits {doing}")

    # ---- reports

    def report(self, text: str) -> None:
        """Let others know what this rank does, for when they wait for it. Costs a message: not for every step."""
        self.store.set(f"report/{self.rank}", f"{time.strftime('%H:%M:%S')} {text}")

    def reports(self, ranks: Sequence[int]) -> str:
        """What ``ranks`` last reported, a few of them."""
        try:
            return "; ".join(f"rank {rank} last reported: {self._reported(rank)}" for rank in ranks[:4])
        except StoreLost as error:  # the error or the notice that asks matters more
            return str(error).partition("\n\n")[0]

    def _reported(self, rank: int) -> str:
        key = f"report/{rank}"
        return self._ask(self.store.get, key).decode() if self._has(key) else "nothing yet"

    def _is_here(self, rank: int) -> bool:
        return rank == self.rank or (self.present(rank) and not self._has(f"left/{rank}"))

    def _has(self, key: str) -> bool:
        return self._ask(self.store.check, [key])

    def _ask(self, operation: Callable[..., T], *args: Any) -> T:
        try:
            return operation(*args)
        except RuntimeError as error:
            raise StoreLost(
                f"the store of the process group does not answer rank {self.rank}: {str(error).splitlines()[0]}",
                "it ends with the process that serves it, torchrun's or that of rank 0: look at their output",
            ) from error

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask(self.store.delete_key, key)


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
    with noticed(group, "at the first call of a compiled model or in zerograph.shard()"):
        dist.all_gather_object(values, value, group=group)
    return values


def _leave(store: dist.Store, rank: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, such as a data loader's worker, lets go of its copy
    try:
        store.set(f"left/{rank}", "")
    except RuntimeError as error:  # the store ends with rank 0, and then there is nobody to tell
        log.debug("rank %d leaves unnoticed: %s", rank, error)


def named(ranks: Sequence[int]) -> str:
    """Such as: rank 3; ranks 0, 2."""
    listed = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
