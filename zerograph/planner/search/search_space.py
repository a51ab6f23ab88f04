"""All plans of a step that put its parameters into the same buckets, each with its predicted seconds and peaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter, le

from zerograph.core.machine import TIERS, Tier
from zerograph.core.plan import Bucket, Plan, decided
from zerograph.planner.profile.regions import Profile
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.schedule import Scheduler
from zerograph.sim.costs import TierBytes
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import Peaks, time_and_peaks

FINEST = 128
"""Tiles of a step up to which all operators are looked at in the most tiles there may be."""

_of_plan: Callable[[Plan], tuple[object, ...]] = attrgetter(*(name for name in decided(Plan) if name != "buckets"))
_of_bucket: Callable[[Bucket], tuple[object, ...]] = attrgetter(*decided(Bucket))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan with its predicted step time in seconds and the peak of every tier in bytes."""

    seconds: float
    peaks: Peaks
    plan: Plan
    space: SearchSpace

    @property
    def peak(self) -> int:
        """Peak bytes of the device."""
        return self.peaks[0]

    @property
    def rank(self) -> tuple[float, Peaks, int]:
        """Faster first, then off the device before on it, then smaller. Among equals the one that was found first
        counts, which is the same on all ranks."""
        return (self.seconds, self.peaks[1:], self.peak)

    @property
    def turned(self) -> int:
        """How many decisions are other ones than those of the rules: of equal plans the one with the fewest counts."""
        ruled = self.space.plan
        buckets = zip(map(_of_bucket, self.plan.buckets), map(_of_bucket, ruled.buckets), strict=True)
        pairs = ((_of_plan(self.plan), _of_plan(ruled)), *buckets)
        return sum(mine != theirs for pair in pairs for mine, theirs in zip(*pair, strict=True))

    @property
    def held(self) -> int:
        """Bytes that the device holds between steps."""
        moved = self.space.scheduler.moved(self.plan)
        return sum(size for tier, size in (*self.space.held, *moved) if tier == "device")

    def fits(self, budget: Sequence[int]) -> bool:
        """Whether no tier holds more than ``budget`` bytes."""
        return all(peak <= most for peak, most in zip(self.peaks, budget, strict=True))

    def beats(self, other: Candidate) -> bool:
        """Whether it is as fast as ``other`` and holds no more on any tier."""
        return self.seconds <= other.seconds and all(map(le, self.peaks, other.peaks))


class SearchSpace:
    """All plans with the buckets of one.

    Attributes:
        plan: by rule.
        held: bytes that are held between steps, before a plan moves any of them.
        most_tiles: of each bucket; 1 where it cannot be tiled.
        size: bytes of a bucket, at most, unless one parameter is larger.
        work: tasks of the plans that were looked at.
    """

    def __init__(
        self, profile: Profile, plan: Plan, rates: Rates, held: TierBytes, *, moments: int = 2,
        most_tiles: tuple[int, ...] = (), size: int = 0, like: SearchSpace | None = None,
        beside: Iterable[SearchSpace] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            like: a space of the same profile and buckets, whose simulations are taken.
            beside: spaces of variants of the step; with one of the same buckets this one shares instructions.
        """
        self.plan, self.held, self.size = plan, held, size
        self.most_tiles = most_tiles or (1,) * len(plan.buckets)
        params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
        others = (space.scheduler for space in beside)
        own = Scheduler(profile, params, names, rates, moments, others) if like is None else like.scheduler
        self.scheduler: Scheduler = own
        self.work = 0
        self._known: dict[object, Candidate] = {}
        self._simulated: dict[object, tuple[float, Peaks, int]] = {} if like is None else like._simulated

    def of(self, plan: Plan) -> Candidate:
        """``plan``, simulated; its buckets hold what those of this space do."""
        # Without offloaded activations nothing is fetched: plans that do the same are simulated once.
        if plan.fetch_ahead > 1 and not plan.offload:
            plan = replace(plan, fetch_ahead=1)
        decided = (*_of_plan(plan), tuple(map(_of_bucket, plan.buckets)))
        found = self._known.get(decided)
        if found is None:
            if decided not in self._simulated:
                self._simulated[decided] = self._judged(plan)
            seconds, peaks, tasks = self._simulated[decided]
            # Counted whoever simulated them, so that a search finds the same beside others as alone.
            self.work += tasks
            found = self._known[decided] = Candidate(seconds, peaks, plan, self)
        return found

    def _judged(self, plan: Plan) -> tuple[float, Peaks, int]:
        """Seconds and peaks of ``plan``, and tasks that it has."""
        scheduler = self.scheduler
        return time_and_peaks(
            coarse_programs(scheduler, plan), scheduler.shared.costs, self.held + scheduler.moved(plan)
        )

    def full_of(self, candidate: Candidate) -> Candidate:
        """One of this space, simulated with all layers."""
        return candidate

    @property
    def finest(self) -> tuple[int, ...]:
        """The most tiles that are looked at everywhere at once: those of the size where so many would take too long."""
        return self.most_tiles if sum(self.most_tiles) <= FINEST + len(self.most_tiles) else self.fewest_tiles()

    def fewest_tiles(self) -> tuple[int, ...]:
        """Tiles of every bucket that may be tiled, as few as make each fit the size, if it may be so many."""
        return tuple(
            max(1, min(-(-bucket.gathered_bytes // max(1, self.size)), most))
            for bucket, most in zip(self.plan.buckets, self.most_tiles, strict=True)
        )


def overrun(peaks: Iterable[int], budget: Iterable[int]) -> tuple[float, int, Tier]:
    """The tier that ``peaks`` fill most: by what share of its ``budget`` it is overrun (0 or less where all fit), the
    bytes that it holds, and which one it is. One that is not there and holds nothing is not asked."""
    each = zip(peaks, budget, TIERS, strict=True)
    shares = (((peak - most) / max(1, most), peak, tier) for peak, most, tier in each if peak or most)
    return max(shares, key=itemgetter(0))


def variant_of(plan: Plan) -> tuple[int, int, bool]:
    """Tiles of the loss, and of tokens, and whether these are of whole samples."""
    return plan.loss_tiles, plan.token_tiles, plan.by_sample


def frontier(found: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats, the smallest on the device first."""
    best: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.peaks, c.rank)):
        # Earlier ones hold no more on the device, so the other tiers and the time decide.
        seconds, rest = candidate.seconds, candidate.peaks[1:]
        if not any(b.seconds <= seconds and all(map(le, b.peaks[1:], rest)) for b in reversed(best)):
            best.append(candidate)
    return best


def limits(budget: int | Mapping[Tier, int]) -> tuple[int, ...]:
    """Bytes that each of :data:`~zerograph.core.machine.TIERS` may hold."""
    if isinstance(budget, int):
        return (budget, *(sys.maxsize for _ in TIERS[1:]))
    return tuple(budget.get(tier, 0) for tier in TIERS)
