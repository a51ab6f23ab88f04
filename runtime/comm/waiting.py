"""One wait of a rank for others, whatever they exchange: how long it goes on, and what is said of it.

*Long.* After ten seconds a rank logs for what it waits and for whom, and lets the others know where it is. Two ranks
that wait for each other at different places wait in vain: both raise at once.

*Too long.* A wait ends after the timeout of the process group, unless a rank compiles meanwhile: it beats, every ten
seconds, and as long as it does the others go on waiting.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from types import TracebackType

from zerograph.core.errors import RankError
from zerograph.runtime.comm.entry import describe_deadlock
from zerograph.runtime.comm.peers import Peers

LOOK = 1.0
"""Seconds between two looks at what becomes of other ranks, a few messages each."""

BEATS = 3.0
"""Beats that a rank may miss before it no longer counts as compiling."""


@dataclass(frozen=True, slots=True)
class WaitedPlace:
    """Where a rank has waited for long.

    Attributes:
        rank: which.
        program: how many programs it has entered since ranks last met; it is in the last of them, unless
        question: it waits for what others tell under this key; else empty.
        doing: the same, for people.
    """

    rank: int
    program: int
    question: str
    doing: str

    def deadlocks_with(self, other: WaitedPlace) -> bool:
        """Whether each waits for what the other does only afterwards.

        Ranks that are in programs need not be: a fast rank may be one ahead, and programs are compared when they begin.
        A rank that waits for a question before it has entered a program keeps those in it waiting.
        """
        if self.question and other.question:
            return self.question != other.question
        asking, running = (self, other) if self.question else (other, self)
        return bool(asking.question) and asking.program < running.program


class BegunWait:
    """A wait that has begun; as a context it tells the others when it ends."""

    def __init__(
        self,
        peers: Peers,
        doing: str,
        missing: Callable[[], Sequence[int]],
        *,
        question: str = "",
        heed: bool = True,
        waited: float = 0.0,
    ) -> None:
        """
        Args:
            doing: what this rank waits for, as in "rank 1 has waited 10 s ...".
            missing: gives the ranks that have not come.
            question: the key under which they are to tell something; empty in a program.
            heed: whether a rank that failed ends the wait.
            waited: seconds so far.
        """
        self.peers, self.doing, self.missing, self.heed = peers, doing, missing, heed
        self.place = WaitedPlace(peers.rank, peers.programs, question, doing)
        self.start = time.monotonic() - waited
        self._next_look, self._noticed, self._posted = 0.0, False, False
        self._beats, self._beat_at = 0, -math.inf

    def __enter__(self) -> BegunWait:
        self.peers.waits += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.peers.waits -= 1
        if self._posted and kind is None:
            self.peers.store.delete([self._key])

    def look(self) -> None:
        """Look what has become of the others; to be called again and again.

        Raises:
            RankError: one failed or ended, or the wait has taken too long.
            CollectiveMismatch: another rank waits for this one, at a place to which this one comes only afterwards.
        """
        peers, waited = self.peers, time.monotonic() - self.start
        if self.heed:
            peers.check(self.doing)
        if waited < self._next_look:
            return
        notice = min(peers.notice_after, peers.timeout)
        self._next_look = min(t for t in (waited + LOOK, notice, peers.timeout) if t > waited)
        missing = self.missing()
        if self.place.question:  # in a program the transport knows
            peers.refuse_gone(missing, self.doing)
        if waited >= notice and missing:
            self._notice(missing, waited)
        if waited >= peers.timeout and missing and not self._someone_compiles():
            raise RankError(
                f"rank {peers.rank} waited {waited:.0f} s {self.doing}, and {peers.roster.named(missing)} did not "
                f"come; {peers.reports(missing)}",
                peers.roster.where(missing),
            )

    def _notice(self, missing: Sequence[int], waited: float) -> None:
        if not self._noticed:
            self._noticed, self._beats = True, self.peers.store.count("beats")
            self.peers.notice(self.doing, missing, waited)
        if self.heed:
            first = WaitedPlace(*json.loads(self.peers.store.first(self._key, json.dumps(astuple(self.place)))))
            self._posted = first == self.place
            if self.place.deadlocks_with(first):
                raise self.peers.differ(describe_deadlock(self.place.rank, self.doing, first.rank, first.doing))

    @property
    def _key(self) -> str:
        return f"{self.peers.generation}/waits"

    def _someone_compiles(self) -> bool:
        beats, now = self.peers.store.count("beats"), time.monotonic()
        if beats != self._beats:
            self._beats, self._beat_at = beats, now
        return now - self._beat_at < BEATS * self.peers.beat_every
