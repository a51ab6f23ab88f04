"""Divides a step into work that plans share, before anything is partitioned or lowered.

Plans of the same buckets, tiles, prefetch and recomputation share their pieces
(:mod:`~zerograph.planner.programs.pieces`), which are made once, because the search changes residencies and placements
hundreds of times; from them :mod:`~zerograph.planner.programs.coarse` makes the programs of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from zerograph.core.instructions import Update
from zerograph.core.machine import Tier
from zerograph.core.param_bytes import sizes_of_states
from zerograph.core.placement import second_copies
from zerograph.core.plan import Bucket, Placement, Plan
from zerograph.core.prefetching import gathers_by_start
from zerograph.core.step import Param
from zerograph.planner.profile.regions import Profile
from zerograph.planner.programs.pieces import Division, PhaseWork
from zerograph.planner.programs.placement import BucketPart, bucket_parts, device_update, ring_bytes, streamed
from zerograph.planner.programs.registers import SavedRegisters, SharedInstructions, options_of
from zerograph.sim.costs import TierBytes
from zerograph.sim.rates import Rates

T = TypeVar("T")


class Scheduler:
    """Divides one step as plans whose buckets hold the same parameters do, for coarse programs of them on one machine.

    Attributes:
        shared: what coarse programs of it are made of; ``registers`` are those of it.
    """

    def __init__(
        self,
        profile: Profile,
        buckets: Sequence[Sequence[Param]],
        names: Sequence[str],
        rates: Rates,
        moments: int = 2,
        beside: Iterable[Scheduler] = (),
    ) -> None:
        """
        Args:
            beside: schedulers of variants of the step; with one of the same buckets this one shares what it makes.
        """
        self.profile, self.rates, self.moments = profile, rates, moments
        self.names, self.buckets = names, buckets
        self.bucket_of = {p.name: i for i, params in enumerate(buckets) for p in params}
        work = [region.work[0] for region in profile.regions]  # gradients are the same at all options
        self._full_gradients = {name: size for w in work for atom in w.atoms for name, size in atom.gradients}
        alike = (other.shared for other in beside if self._of_buckets() == other._of_buckets())
        self.shared: SharedInstructions = next(alike, None) or SharedInstructions(rates)
        self.registers = self.shared.registers
        self._division = Division(profile, names, self.bucket_of, self.shared)
        self._all: dict[tuple[int, ...], tuple[tuple[BucketPart, ...], ...]] = {}
        self._options: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[int, ...]] = {}
        self._phases: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[PhaseWork, ...]] = {}
        self._later: dict[tuple[object, ...], tuple[PhaseWork, ...]] = {}  # the same, with gathers that wait
        self._saved: dict[tuple[object, ...], SavedRegisters] = {}
        self._moved: dict[tuple[int, Placement], TierBytes] = {}
        self._streamed = [streamed(params) for params in buckets]

    def _of_buckets(self) -> tuple[object, ...]:
        """All that instructions of buckets are made from."""
        return (self.rates, self.moments, self.names, self.buckets, self._full_gradients)

    def fresh(self) -> Scheduler:
        """The same without the registers and segments of coarse programs so far."""
        return Scheduler(self.profile, self.buckets, self.names, self.rates, self.moments)

    def once(self, make: Callable[..., T], *key: object) -> T:
        """The result of ``make`` for ``key``, which tells it apart from all else that it makes."""
        found: T | None = self.shared.made.get((make, *key))
        if found is None:
            found = self.shared.made[make, *key] = make(self, *key)
        return found

    def options(self, plan: Plan) -> tuple[int, ...]:
        """The option of every layer of the profile under ``plan``."""
        key = (plan.recompute, plan.save)
        if key not in self._options:
            self._options[key] = self.profile.options(*key)
        return self._options[key]

    def phases(self, plan: Plan) -> tuple[PhaseWork, ...]:
        """Forward and backward, divided as ``plan`` cuts them."""
        # Everything that a division depends on: placements and residencies change what is moved, not where work is cut.
        key = (tuple(bucket.tiles for bucket in plan.buckets), plan.prefetch, self.options(plan))
        if key not in self._phases:
            self._phases[key] = tuple(self._division.phases(*key, self.saved(key[-1], ())))
        found, ahead = self._phases[key], plan.ahead()
        if all(one == plan.prefetch for one in ahead):
            return found
        if (*key, ahead) not in self._later:  # only what begins when differs
            self._later[*key, ahead] = tuple(
                replace(phase, gathers=gathers_by_start(phase.intervals, plan.prefetch, ahead)) for phase in found
            )
        return self._later[*key, ahead]

    def bucket_parts(self, bucket: int, tiles: int) -> tuple[BucketPart, ...]:
        """The parts of a bucket; one if it is not tiled."""
        return self.once(Scheduler._cut, bucket, tiles)

    def _cut(self, bucket: int, tiles: int) -> tuple[BucketPart, ...]:
        name, params = self.names[bucket], self.buckets[bucket]
        return bucket_parts(bucket, name, params, tiles, self._full_gradients, self.rates, self.moments)

    def all_bucket_parts(self, tiles: tuple[int, ...]) -> tuple[tuple[BucketPart, ...], ...]:
        """The parts of every bucket."""
        if tiles not in self._all:
            self._all[tiles] = tuple(self.bucket_parts(bucket, count) for bucket, count in enumerate(tiles))
        return self._all[tiles]

    def moved(self, plan: Plan) -> TierBytes:
        """The change of memory held between steps by placements of buckets off the device, by tier."""
        placements, staging = (bucket.placement for bucket in plan.buckets), self.rates.staging
        ring = ring_bytes(zip(placements, self._streamed, strict=True), staging)
        return *self.moved_of(plan, plan.buckets).items(), (staging, ring)

    def moved_of(self, plan: Plan, buckets: Iterable[Bucket]) -> dict[Tier, int]:
        """The same by placements of some ``buckets`` alone, without staging buffers."""
        found: dict[Tier, int] = {}
        for bucket in buckets:
            key = (bucket.index, bucket.placement)
            if key not in self._moved:
                self._moved[key] = self.bucket_parts(bucket.index, 1)[0].shards.moved(bucket.placement)
            for tier, size in self._moved[key]:
                found[tier] = found.get(tier, 0) + size
            if second_copies(plan, bucket):
                copies = self.bucket_parts(bucket.index, 1)[0].shards.at(bucket.placement).copies
                found["host"] = found.get("host", 0) + copies
        return found

    def update(self, host: Sequence[int]) -> Update:
        """The update on the device, when the states of the buckets ``host`` live off it."""
        key = ("update", frozenset(host))
        found: Update | None = self.shared.made.get(key)
        if found is None:
            state_sizes = sizes_of_states(chain.from_iterable(self.buckets), self.moments)
            found = self.shared.made[key] = device_update(self.buckets, host, state_sizes)
        return found

    def update_inside(self, bucket: int, gradient: int) -> Update:
        """The update on the device of the shards of a bucket, whose ``gradient`` goes with it."""
        shards = [param for param in self.buckets[bucket] if param.sharded]
        update = device_update([shards], (), sizes_of_states(shards, self.moments))
        return Update((bucket,), update.sizes, reads=(gradient,), dead=(gradient,))

    def saved(self, options: tuple[int, ...], offload: tuple[tuple[str, Tier], ...]) -> SavedRegisters:
        """The registers of what lives from region to region."""
        if (options, offload) not in self._saved:
            at = options_of(self.profile, options)
            self._saved[options, offload] = SavedRegisters(self.profile, at, dict(offload), self.registers)
        return self._saved[options, offload]
