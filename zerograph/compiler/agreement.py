"""All ranks agree on a frame's collectives before any of them runs one.

Ranks exchange a digest of the sequence through the process group's key-value store, once per frame and set of
parameters, when the first such program is made. Later programs of the same frame (other shapes, evaluation) may be
compiled by one rank alone; they communicate nothing and are compared with the first one locally.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zerograph.core.errors import CollectiveMismatch
from zerograph.core.plan import GivenPlan
from zerograph.core.program import Program
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import ROUTES, reason_of
from zerograph.runtime.comm.rendezvous import Rendezvous, shared
from zerograph.runtime.torch_private import backend_name


class Agreement:
    """The sequences agreed so far, of one backend on one rank.

    Attributes:
        peers: the ranks whose programs have the same collectives as this one's.
    """

    def __init__(self, group: dist.ProcessGroup, rendezvous: Rendezvous, peers: Sequence[int] | None = None) -> None:
        self.rank, self.world_size, self.rendezvous, self._group = group.rank(), group.size(), rendezvous, group
        self.peers = range(self.world_size) if peers is None else peers
        self._first: dict[str, dict[str, list[str]]] = {}

    @classmethod
    def open(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        plan: GivenPlan | None = None,
        peers: Sequence[int] | None = None,
    ) -> Agreement | None:
        """An agreement between the ranks of ``group``, who all call this; None where ranks are simulated.

        Args:
            plan: to replay.
            peers: the ranks that this one shares parameters with, by their numbers in ``group``; all, unless given.
                Others have parts of the same parameters, which may have other shapes.

        Raises:
            CollectiveMismatch: ranks were given different plans to replay, or some of them none.
        """
        # A fake group has no peers: waiting for their keys would never end.
        if backend_name(group, device) == "fake":
            return None
        mine = (plan.plan.digest if plan is not None else None, str(plan))
        _compare_plans(shared(group, mine))
        return cls(group, Rendezvous.open(group, device), peers)

    @contextmanager
    def compiling(self, code: str, communicator: Communicator) -> Iterator[None]:
        """Inside, this rank compiles the user's function ``code``; others, who may wait, hear if that fails."""
        try:
            # After a failure on another rank this compilation belongs to the next generation of ranks
            # (runtime/comm/rendezvous.py).
            communicator.rejoin()
            with self.rendezvous.compiling(code):
                yield
        # Ctrl-C too: the other ranks wait for what this one would have broadcast.
        except BaseException as error:
            communicator.abort(f"while compiling {code}: {reason_of(error)}")
            raise

    def require_same(self, lines: Sequence[str]) -> None:
        """Compare ``lines``, what this rank was given, with those of all ranks, who call this together.

        Raises:
            CollectiveMismatch: on all ranks alike, naming the first rank and line that differ from rank 0's.
        """
        # Digests first: the lines are as many as the model has parameters, and nearly always equal.
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        digests = shared(self._group, digest)
        if len(set(digests)) == 1:
            return
        given = shared(self._group, list(lines))
        rank = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
        pairs = itertools.zip_longest(given[0], given[rank], fillvalue="nothing more")
        # The digests differ, so some pair does: `next` cannot come to an end.
        first, other = next((a, b) for a, b in pairs if a != b)
        raise CollectiveMismatch(
            f"ranks shard different models, or in different ways: rank 0 has {first}, rank {rank} has {other}",
            "build the same model on every rank, with gradients of the same parameters, and give zerograph.backend the "
            "same arguments",
        )

    def check(self, code: str, program: Program) -> None:
        """Compare ``program``, compiled from the user's function ``code``, with other ranks or with its predecessor.

        Raises:
            CollectiveMismatch: naming the first collective that differs, or the ranks that never got here.
        """
        sequence = list(program.collectives())
        # A graph without collectives may be compiled by one rank alone, so waiting for the others here could hang.
        if not sequence:
            return
        frame = f"{code} {program.kind}"
        variants = self._first.setdefault(frame, {})
        # Sorted: the same collectives in another order are a mismatch to report, not a variant to agree on anew.
        variant = "\n".join(sorted(sequence))
        if variant in variants:
            _compare(frame, "the first program of this frame", variants[variant], "this one", sequence)
            return
        self._exchange(f"{frame} #{len(variants)}", sequence)
        variants[variant] = sequence  # not before: one that an error interrupts is exchanged again, under the same key

    def broadcast(self, key: str, mine: Any) -> None:
        """Let other ranks know ``mine`` (data that JSON can hold) under ``key``; once per key."""
        self.rendezvous.store.set(f"agreement/{key}/{self.rank}", json.dumps(mine))

    def receive(self, key: str, rank: int) -> Any:
        """The message of ``rank`` under ``key``; waits for it.

        Raises:
            RankError: it failed, ended, or broadcast nothing within the timeout of the process group.
            CollectiveMismatch: it waits for this rank, elsewhere.
        """
        name = f"agreement/{key}/{rank}"
        self.rendezvous.wait({rank: name}, f"for rank {rank} to compile {key}", key)
        return json.loads(self.rendezvous.store.get(name))

    def gather(self, key: str, mine: Any) -> list[Any]:
        """The messages of all ranks under ``key``, by rank."""
        self.broadcast(key, mine)
        return [self.receive(key, rank) for rank in range(self.world_size)]

    def _exchange(self, key: str, sequence: list[str]) -> None:
        name = f"agreement/{key}/{self.rank}"
        self.rendezvous.void.append(name)  # should this fail, the next try may broadcast another sequence
        self.broadcast(key, sequence)
        for other in self.peers:
            _compare(key, f"rank {other}", self.receive(key, other), f"rank {self.rank}", sequence)
        self.rendezvous.void.remove(name)


def _compare_plans(plans: Sequence[tuple[str | None, str]]) -> None:
    """Every rank sees the plans of all, so that all raise, and none waits for another."""
    first = plans[0]
    for rank, plan in enumerate(plans):
        if plan[0] != first[0]:
            raise CollectiveMismatch(
                f"ranks replay different plans: rank 0 {_replays(*first)}, rank {rank} {_replays(*plan)}",
                "give zerograph.backend(plan=...) the same file on every rank, or on none",
            )


def _replays(digest: str | None, text: str) -> str:
    return "replays none" if digest is None else f"replays {text}"


def _compare(frame: str, who: str, theirs: list[str], me: str, mine: list[str]) -> None:
    if theirs == mine:
        return
    # `ndiff` also gives lines that begin with "?", which only point at characters.
    differing = [line for line in difflib.ndiff(theirs, mine) if line[0] in "+-"]
    shown = [f"  {who if line[0] == '-' else me} only: {line[2:]}" for line in differing[:6]]
    raise CollectiveMismatch(
        f"{frame}: {who} and {me} would run different collectives "
        f"({len(theirs)} against {len(mine)}, {len(differing)} differ)\n" + "\n".join(shown),
        "every rank must use the same parameters in the same order: make control flow in forward the same on all "
        f"ranks, or: {ROUTES}. With token_tiles, give all ranks as many tokens",
    )
