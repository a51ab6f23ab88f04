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
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerograph.errors import CollectiveMismatch
from zerograph.plan import GivenPlan
from zerograph.runtime.comm import backend_name
from zerograph.runtime.program import Program


class Agreement:
    """The sequences agreed so far, of one backend on one rank."""

    def __init__(self, group: dist.ProcessGroup, scope: str, timeout: timedelta = timedelta(minutes=10)) -> None:
        self.rank, self.world_size, self.timeout, self._group = group.rank(), group.size(), timeout, group
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"zerograph/{scope}", store)
        self._first: dict[str, dict[str, list[str]]] = {}

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device, plan: GivenPlan | None = None) -> Agreement | None:
        """An agreement between the ranks of ``group``, who all call this; None where ranks are simulated.

        Raises:
            CollectiveMismatch: ranks were given different plans to replay, or some of them none.
        """
        if backend_name(group, device) == "fake":
            return None
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, (uuid.uuid4().hex, plan and plan.plan.digest, str(plan)), group=group)
        _compare_plans([(digest, text) for _, digest, text in told])
        return cls(group, told[0][0])

    def require_same(self, lines: Sequence[str]) -> None:
        """Compare ``lines``, what this rank was given, with those of all ranks, who call this together.

        Raises:
            CollectiveMismatch: on all ranks alike, naming the first rank and line that differ from rank 0's.
        """
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        digests: list[Any] = [None] * self.world_size
        dist.all_gather_object(digests, digest, group=self._group)
        if len(set(digests)) == 1:
            return
        given: list[Any] = [None] * self.world_size
        dist.all_gather_object(given, list(lines), group=self._group)
        rank = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
        pairs = itertools.zip_longest(given[0], given[rank], fillvalue="nothing more")
        first, other = next((a, b) for a, b in pairs if a != b)
        raise CollectiveMismatch(
            f"ranks shard different models, or in different ways: rank 0 has {first}, rank {rank} has {other}",
            "build the same model on every rank, and give zerograph.backend the same arguments",
        )

    def check(self, code: str, program: Program) -> None:
        """Compare ``program``, compiled from the user's function ``code``, with other ranks or with its predecessor.

        Raises:
            CollectiveMismatch: naming the first collective that differs, or the ranks that never got here.
        """
        sequence = list(program.collectives())
        if not sequence:
            return
        frame = f"{code} {program.kind}"
        variants = self._first.setdefault(frame, {})
        variant = "\n".join(sorted(sequence))
        if variant in variants:
            _compare(frame, "the first program of this frame", variants[variant], "this one", sequence)
            return
        key = f"{frame} #{len(variants)}"
        variants[variant] = sequence
        self._exchange(key, sequence)

    def tell(self, key: str, mine: Any) -> None:
        """Let other ranks know ``mine`` (data that JSON can hold) under ``key``; once per key."""
        self._store.set(f"{key}/{self.rank}", json.dumps(mine))

    def told(self, key: str, rank: int) -> Any:
        """What ``rank`` tells under ``key``; waits for it.

        Raises:
            CollectiveMismatch: it did not within the timeout.
        """
        name = f"{key}/{rank}"
        try:
            self._store.wait([name], self.timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            raise CollectiveMismatch(
                f"rank {rank} did not compile {key} within {self.timeout.total_seconds():.0f} s of rank {self.rank}",
                f"see whether rank {rank} failed, or takes another path through the model than rank {self.rank}",
            ) from error
        return json.loads(self._store.get(name))

    def answers(self, key: str, mine: Any) -> list[Any]:
        """What every rank tells under ``key``, by rank."""
        self.tell(key, mine)
        return [self.told(key, rank) for rank in range(self.world_size)]

    def _exchange(self, key: str, sequence: list[str]) -> None:
        self.tell(key, sequence)
        for other in range(self.world_size):
            _compare(key, f"rank {other}", self.told(key, other), f"rank {self.rank}", sequence)


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
    differing = [line for line in difflib.ndiff(theirs, mine) if line[0] in "+-"]
    shown = [f"  {who if line[0] == '-' else me} only: {line[2:]}" for line in differing[:6]]
    raise CollectiveMismatch(
        f"{frame}: {who} and {me} would run different collectives "
        f"({len(theirs)} against {len(mine)}, {len(differing)} differ)\n" + "\n".join(shown),
        "every rank must use the same parameters in the same order; make control flow in forward the same on all ranks",
    )
