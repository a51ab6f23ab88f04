"""The plan with the least predicted step time that fits a memory budget.

What is free is searched: which buckets stay gathered from forward to backward, which layers are recomputed, bucket size
and prefetch. Every candidate is simulated. Which candidates are looked at does not depend on the budget: a coarse grid
of counts, and finer steps behind those of it that no other beats in both time and memory. More budget therefore never
finds a slower plan. Steps that are small enough are searched completely.

All ranks that are given the same step, machine and budget find the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from typing import Literal, TypeVar

from zerograph.config import DEFAULT_BUCKET_SIZE, DEFAULT_PREFETCH, Recompute
from zerograph.ir import Step
from zerograph.machine import Machine
from zerograph.planner.candidates import Candidate, Space, frontier
from zerograph.planner.rates import Rates, state_bytes
from zerograph.planner.regions import Profile, profile
from zerograph.planner.rules import plan_step
from zerograph.planner.simulate import Memory

T = TypeVar("T")
MIB = 2**20
BUCKET_SIZES = (8 * MIB, 16 * MIB, DEFAULT_BUCKET_SIZE, 64 * MIB, 128 * MIB)
PREFETCHES = (0, DEFAULT_PREFETCH, 2, 4)
GRID = 4
"""Steps of a count in the coarse grid, and between two neighbours of it."""
SPACES = 2
"""Pairs of bucket size and prefetch of which the counts are searched."""
COMPLETE = 1100
"""Candidates up to which all are looked at."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user fixed; None and "auto" leave the choice to the search.

    Attributes:
        stage: 0 to 3 fix every bucket's residency; "auto" shards parameters and chooses it per bucket.
        world_size: ranks to shard over.
        bucket_size: bytes of gathered parameters per bucket, at most.
        prefetch: buckets gathered ahead.
        recompute: as in :class:`~zerograph.config.Config`; "auto" chooses per layer.
    """

    stage: Literal[0, 1, 2, 3, "auto"]
    world_size: int
    bucket_size: int | None = None
    prefetch: int | None = None
    recompute: Recompute = "auto"


class Search:
    """Candidates for one step on one machine; ask :meth:`within` for the best of any budget."""

    def __init__(
        self, step: Step, wish: Wish, machine: Machine, *, states: int | None = None, moments: int = 2,
        complete: int = COMPLETE,
    ) -> None:  # fmt: skip
        """
        Args:
            states: bytes on the device between steps; default: shards and ``moments`` optimizer states of the
                step's parameters.
            complete: number of candidates up to which all are looked at.
        """
        self.wish = wish
        self.profile = profile(step, ("none", "full") if wish.recompute == "none" else ("auto", "full"))
        self.states = sum(state_bytes(step.params, wish.world_size, moments)) if states is None else states
        self.spaces = list(_spaces(step, self.profile, wish, machine, self.states))
        prefetches = PREFETCHES if wish.prefetch is None else (wish.prefetch,)
        if not step.params or not step.training:
            prefetches = (DEFAULT_PREFETCH if wish.prefetch is None else wish.prefetch,)
        places = [(space, prefetch) for space in self.spaces for prefetch in prefetches]
        if sum(2 ** (len(s.keeps) + len(s.saves)) for s, _ in places) <= complete:
            self.best = frontier(chain.from_iterable(_all(*place) for place in places))
        else:
            points = {p.candidate: p for place in _worthwhile(places) for p in _grid(*place)}
            finer = [c for candidate in frontier(points) for c in points[candidate].finer()]
            self.best = frontier((*points, *finer))

    @property
    def smallest(self) -> Candidate:
        """The one that needs the least memory."""
        return self.best[0]

    def within(self, budget: int) -> Candidate | None:
        """The fastest whose peak is at most ``budget`` bytes; None when none is."""
        fitting = [candidate for candidate in self.best if candidate.peak <= budget]
        return fitting[-1] if fitting else None


def _spaces(step: Step, found: Profile, wish: Wish, machine: Machine, states: int) -> Iterator[Space]:
    """One per distinct way to put parameters into buckets."""
    sizes = BUCKET_SIZES if wish.bucket_size is None else (wish.bucket_size,)
    seen = set()
    held: Memory = (("device", states),)
    for size in sizes:
        plan = plan_step(
            step,
            stage=3 if wish.stage == "auto" else wish.stage,
            world_size=wish.world_size,
            bucket_size=size,
            prefetch=DEFAULT_PREFETCH,
            recompute=wish.recompute,
        )
        if plan not in seen:
            seen.add(plan)
            rates = Rates(machine, wish.world_size, plan.compute_dtype)
            yield Space(found, plan, rates, held, keep=wish.stage == "auto", save=wish.recompute == "auto")


def _all(space: Space, prefetch: int) -> Iterator[Candidate]:
    for kept in _subsets(space.keeps):
        for saved in _subsets(space.saves):
            yield space.candidate(prefetch, kept, saved)


def _subsets(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def _worthwhile(places: Sequence[tuple[Space, int]]) -> list[tuple[Space, int]]:
    """The pairs of buckets and prefetch that are fastest or smallest with nothing kept and everything saved."""
    seen: dict[Candidate, tuple[Space, int]] = {}
    for space, prefetch in places:
        seen.setdefault(space.counted(prefetch, 0, len(space.saves)), (space, prefetch))
    best = frontier(seen)
    chosen = {round(k * (len(best) - 1) / (SPACES - 1)) for k in range(SPACES)}
    return [seen[best[k]] for k in sorted(chosen)]


@dataclass(frozen=True, slots=True)
class _Point:
    """A candidate of the grid, and the counts that belong to it and to the next ones."""

    space: Space
    prefetch: int
    kept: tuple[int, int]
    saved: tuple[int, int]

    @property
    def candidate(self) -> Candidate:
        return self.space.counted(self.prefetch, self.kept[0], self.saved[0])

    def finer(self) -> Iterator[Candidate]:
        """What lies between this point and the next ones of the grid, one count changed at a time."""
        for kept in _steps(*self.kept):
            yield self.space.counted(self.prefetch, kept, self.saved[0])
        for saved in _steps(*self.saved):
            yield self.space.counted(self.prefetch, self.kept[0], saved)


def _grid(space: Space, prefetch: int) -> Iterator[_Point]:
    for kept in _cells(len(space.keeps)):
        for saved in _cells(len(space.saves)):
            yield _Point(space, prefetch, kept, saved)


def _cells(count: int) -> list[tuple[int, int]]:
    """Ranges that begin at each step of a count; the last one is its end."""
    steps = _steps(0, count)
    return [*pairwise(steps), (count, count)]


def _steps(begin: int, end: int) -> list[int]:
    return sorted({begin + round(k * (end - begin) / GRID) for k in range(GRID + 1)})
