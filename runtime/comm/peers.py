"""One rank's view of the others, and its reports to them: who has failed, who is gone, what each last reported."""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from zerograph.core.errors import ZeroGraphError
from zerograph.runtime.comm.ending import ROLL_CALL, Ending
from zerograph.runtime.comm.roster import Roster
from zerograph.runtime.comm.store_client import StoreClient, StoreLost

log = logging.getLogger(__name__)

NOTICE = 10.0
"""Seconds of waiting after which a rank says so."""

POLL = 0.05
"""Seconds between two looks at the store, which is a message to its server each."""


class Peers:
    """The ranks of one backend, as one of them sees them.

    Attributes:
        timeout: seconds to wait for another rank, those of the process group.
        notice_after: seconds of waiting after which this rank says so.
        beat_every: seconds after which a rank that compiles says again that it does.
        generation: counts the errors that ranks have recovered from.
        failed: whether the generation has ended for this rank.
        programs: counts those that this rank has entered in the generation.
        collectives: counts those that this rank has launched.
        waits: how many waits of this rank there are now.
        void: keys of this rank that others may not read in the next generation; it deletes them before it meets.
        present: tells of a rank whether its process is there, as far as the transport knows.
        hang_up: ends what others wait for that cannot look here; called once this rank knows that the generation ended.
    """

    def __init__(
        self, store: dist.Store, scope: str, rank: int, world_size: int, timeout: float, roster: Roster | None = None
    ) -> None:
        self.rank, self.world_size, self.timeout, self.roster = rank, world_size, timeout, roster or Roster()
        self.generation, self.failed, self.programs, self.waits = 0, False, 0, 0
        self.collectives = 0
        self.notice_after, self.beat_every = NOTICE, min(NOTICE, timeout / 3)
        self.present: Callable[[int], bool] = lambda rank: True
        self.hang_up: Callable[[], None] = lambda: None
        self.void: list[str] = []
        self.store = StoreClient(store, f"zerograph/{scope}", rank, timeout)
        weakref.finalize(self, _leave, self.store, rank, os.getpid())

    def fail(self, reason: str) -> None:
        """End the generation, on this rank and for all; ``reason`` is this rank's error. The first one counts."""
        if self.failed:
            return
        self.failed = True
        try:
            self.report(f"failed: {reason}")
            self._end(Ending(self.rank, "error", reason))
        except StoreLost as error:  # the error that is on its way matters more
            log.warning("rank %d cannot tell the others that it failed: %s", self.rank, error)
        finally:
            self.hang_up()

    def differ(self, difference: ZeroGraphError) -> ZeroGraphError:
        """The error to raise for a ``difference`` between ranks that this rank has found; the others raise the same."""
        return self._error(self._end(Ending.of_difference(self.rank, difference)), "")

    def disconnected(self, doing: str, why: str) -> ZeroGraphError:
        """The error to raise where a connection of this rank has closed, as the transport says in ``why``."""
        return self._error(self._end(Ending(self.rank, "connection", why)), doing)

    def refuse_gone(self, ranks: Sequence[int], doing: str) -> None:
        """Raises:
        RankError: the process of one of ``ranks`` has ended.
        """
        gone = tuple(rank for rank in ranks if not self._is_here(rank))
        if gone:
            raise self._error(self._end(Ending(self.rank, "process", gone=gone)), doing)

    def check(self, doing: str) -> None:
        """Look whether a rank has ended this generation.

        Raises:
            RankError: naming the first that did, and its error.
            CollectiveMismatch: ranks are at different places.
            StoreLost: nobody can say.
        """
        if self.store.has(self._ended):
            raise self._error(Ending.from_json(self.store.get(self._ended)), doing)

    @property
    def _ended(self) -> str:
        return f"{self.generation}/ended"

    def _end(self, ending: Ending) -> Ending:
        """End the generation; returns what has ended it, which may be what another rank saw before."""
        return Ending.from_json(self.store.first(self._ended, ending.to_json()))

    def _error(self, ending: Ending, doing: str) -> ZeroGraphError:
        self.hang_up()  # first: who waits for this rank answers no roll call
        if ending.kind == "connection":
            ending = replace(ending, gone=self._silent(ending.rank))
        return ending.error(f"rank {self.rank} cannot go on {doing}", self.roster, self.reports(ending.gone))

    def _silent(self, asker: int) -> tuple[int, ...]:
        """The ranks that do not answer, as the rank ``asker`` finds out for all."""
        replies, silent = f"{self.generation}/replies", f"{self.generation}/silent"
        self.store.set(f"{replies}/{self.rank}", "")
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + ROLL_CALL
        while asker == self.rank and missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self.store.has(f"{replies}/{rank}")]
            time.sleep(POLL)
        if asker == self.rank:
            self.store.set(silent, json.dumps(missing))
        while not self.store.has(silent) and time.monotonic() < deadline + 1:
            time.sleep(POLL)
        return tuple(json.loads(self.store.get(silent))) if self.store.has(silent) else ()

    def notice(self, doing: str, missing: Sequence[int], waited: float) -> None:
        """Say that this rank has ``waited`` for so many seconds, here and to the others."""
        log.warning(
            "rank %d has waited %.0f s %s, for %s, and will wait up to %.0f s; %s\n\nhint: %s",
            self.rank,
            waited,
            doing,
            self.roster.named(missing),
            self.timeout,
            self.reports(missing),
            self.roster.where(missing),
        )
        self.report(f"waits {doing}")

    def report(self, text: str) -> None:
        """Let others know what this rank does, for when they wait for it. Costs a message: not for every step."""
        self.store.set(f"report/{self.rank}", f"{time.strftime('%H:%M:%S')} {text}")

    def reports(self, ranks: Sequence[int]) -> str:
        """The last reports of ``ranks``, a few of them."""
        try:
            return "; ".join(f"rank {rank} last reported: {self._reported(rank)}" for rank in ranks[:4])
        except StoreLost as error:  # the error or the notice that asks matters more
            return str(error).partition("\n\n")[0]

    def _reported(self, rank: int) -> str:
        key = f"report/{rank}"
        return self.store.get(key) if self.store.has(key) else "nothing yet"

    def _is_here(self, rank: int) -> bool:
        return rank == self.rank or (self.present(rank) and not self.store.has(f"left/{rank}"))


def _leave(store: StoreClient, rank: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child, such as a data loader's worker, lets go of its copy
        store.say_goodbye(f"left/{rank}")
