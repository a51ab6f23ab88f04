"""The plans that a search looks at, and which of them are worth having: no other is both faster and smaller.

Two things are decided layer by layer: which gathered buckets stay whole from forward to backward, and which layers are
saved rather than recomputed. Layers that are alike are interchangeable, so a candidate is two counts: the first so many
buckets, and the first so many layers, of two fixed orders by seconds saved per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zerograph.plan import Bucket, Plan, Residency
from zerograph.planner.rates import Rates, gathered_bytes
from zerograph.planner.regions import Profile
from zerograph.planner.schedule import Scheduler
from zerograph.planner.simulate import Memory, measure

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of one space with its predicted step time in seconds and its peak of device memory in bytes.

    ``kept`` are the buckets that stay whole until the backward, ``recomputed`` the layers that are computed again.
    """

    seconds: float
    peak: int
    space: Space
    prefetch: int
    kept: tuple[int, ...]
    recomputed: tuple[str, ...]

    @property
    def rank(self) -> tuple[object, ...]:
        """Faster first, then smaller; ties are broken by the decisions, the same way on all ranks."""
        return (self.seconds, self.peak, len(self.space.plan.buckets), self.prefetch, self.kept, self.recomputed)

    @property
    def plan(self) -> Plan:
        """The candidate as a plan."""
        return self.space.plan_of(self.prefetch, self.kept, self.recomputed)


class Space:
    """All plans with the same buckets.

    Attributes:
        plan: one that holds what does not vary here: stage, buckets, what is recomputed when nothing is free.
        keeps: buckets that may be kept from forward to backward, the most rewarding first; none below stage 3.
        saves: layers that may be recomputed or saved, the most rewarding to save first; none when that is fixed.
    """

    def __init__(self, profile: Profile, plan: Plan, rates: Rates, held: Memory, *, keep: bool, save: bool) -> None:
        self.plan, self.held = plan, held
        self.scheduler = Scheduler(profile, [b.params for b in plan.buckets], [b.name for b in plan.buckets], rates)
        self.keeps = tuple(_keeps(plan, rates)) if keep and profile.training else ()
        self.saves = tuple(_saves(profile, rates)) if save and profile.training else ()
        self._known: dict[tuple[int, tuple[int, ...], tuple[str, ...]], Candidate] = {}

    def candidate(self, prefetch: int, kept: Iterable[int], saved: Iterable[str]) -> Candidate:
        """The plan that keeps the buckets ``kept`` and recomputes all free layers but ``saved``."""
        recomputed = self.plan.recompute
        if self.saves:
            spared = frozenset(saved)
            recomputed = tuple(layer for layer in self.scheduler.profile.layers if layer not in spared)
        key = (prefetch, tuple(sorted(kept)), recomputed)
        if key not in self._known:
            tasks = self.scheduler.schedule(self._residencies(key[1]), prefetch, recomputed, self.plan.save_others)
            seconds, peak = measure(tasks, self.held)
            self._known[key] = Candidate(seconds, peak, self, *key)
        return self._known[key]

    def counted(self, prefetch: int, kept: int, saved: int) -> Candidate:
        """The plan that keeps the first ``kept`` buckets and saves the first ``saved`` layers."""
        return self.candidate(prefetch, self.keeps[:kept], self.saves[:saved])

    def plan_of(self, prefetch: int, kept: Sequence[int], recomputed: tuple[str, ...]) -> Plan:
        """The plan with these decisions."""
        residencies = self._residencies(kept)
        buckets = tuple(replace(b, residency=r) for b, r in zip(self.plan.buckets, residencies, strict=True))
        return replace(self.plan, prefetch=prefetch, buckets=buckets, recompute=recomputed)

    def _residencies(self, kept: Sequence[int]) -> list[Residency]:
        found: list[Residency] = [bucket.residency for bucket in self.plan.buckets]
        for index in kept:
            found[index] = "backward"
        return found


def _keeps(plan: Plan, rates: Rates) -> list[int]:
    def reward(bucket: Bucket) -> float:
        size = gathered_bytes(bucket.params, rates.world_size)
        return rates.collective(size) / max(1, size)

    return [b.index for b in _by_reward(plan.buckets, reward)]


def _saves(profile: Profile, rates: Rates) -> list[str]:
    """Layers in the order of the seconds that recomputing them takes, per byte that it frees."""
    seconds = dict.fromkeys(profile.layers, 0.0)
    size = dict.fromkeys(profile.layers, 0)
    for region in profile.regions:
        if region.layer in seconds:
            for mode, sign in (("full", 1), ("auto", -1)):
                atoms = region.work[mode].atoms  # type: ignore[index]  # both are literals of Mode
                cost = rates.compute(sum(a.flops for a in atoms), sum(a.moved for a in atoms))
                seconds[region.layer] += sign * cost
    for life in profile.lives:
        layer = profile.regions[life.start].layer
        if layer in size:
            size[layer] += life.bytes * (("auto" in life.saved) - ("full" in life.saved))
    return _by_reward(profile.layers, lambda layer: seconds[layer] / max(1, size[layer]))


def _by_reward(items: Sequence[T], reward: Callable[[T], float]) -> list[T]:
    """The most rewarding first. Equally rewarding ones from the last, which are needed for the shortest time, then
    evenly spread, so that what is left over overlaps with what is not."""
    groups: dict[float, list[T]] = {}
    for item in items:
        groups.setdefault(float(f"{reward(item):.6g}"), []).append(item)  # what differs by rounding is alike
    return [item for value in sorted(groups, reverse=True) for item in _spread(groups[value])]


def _spread(items: Sequence[T]) -> list[T]:
    """The last, then those in the middle of the largest gaps (van der Corput's sequence)."""
    order = sorted(range(len(items)), key=lambda i: _reversed_bits(len(items) - 1 - i, len(items)))
    return [items[i] for i in order]


def _reversed_bits(number: int, count: int) -> int:
    width = max(1, (count - 1).bit_length())
    return int(f"{number:0{width}b}"[::-1], 2)


def frontier(found: Iterable[Candidate]) -> list[Candidate]:
    """Those than which no other is faster and no larger, the smallest first."""
    best: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.peak, c.rank)):
        if not best or candidate.seconds < best[-1].seconds:
            best.append(candidate)
    return best
