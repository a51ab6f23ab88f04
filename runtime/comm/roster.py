"""The processes of the ranks, and what they are called in messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """Where a rank runs."""

    host: str
    pid: int

    @classmethod
    def here(cls) -> Process:
        """This one."""
        return cls(socket.gethostname(), os.getpid())


@dataclass(frozen=True, slots=True)
class Roster:
    """The process of every rank, by rank; empty where none was gathered."""

    processes: Sequence[Process] = ()

    def named(self, ranks: Sequence[int]) -> str:
        """Such as: rank 3; ranks 0, 2; where there are several hosts, rank 3 (host b)."""
        listed = ", ".join(f"{rank}{self._host_of(rank)}" for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        return f"rank{'s' if len(ranks) > 1 else ''} {listed}"

    def _host_of(self, rank: int) -> str:
        several = len({process.host for process in self.processes}) > 1
        return f" ({self.processes[rank].host})" if several else ""

    def where(self, ranks: Sequence[int]) -> str:
        """A hint on how to find out what ``ranks`` do."""
        look = f"look at the output of {self.named(ranks)}"
        if not self.processes or not ranks:
            return look
        process = self.processes[ranks[0]]
        return f"{look}; `py-spy dump --pid {process.pid}` on {process.host} shows where rank {ranks[0]} is"
