"""The phases of a step, divided into pieces of work and intervals of buckets.

They follow what the passes and the lowering will do, at the grain of one piece per layer and interval of a bucket.
Coarser than programs that run: what is saved follows :mod:`~zerograph.planner.profile.liveness`, memory of a layer that
a plan cuts in several is taken with its first part, and several short layers are not merged into one segment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType

from zerograph.core.cost import Cost
from zerograph.core.instructions import Compute
from zerograph.core.prefetching import UnshardedInterval, gathers_by_start, unsharded_intervals
from zerograph.core.step import Phase
from zerograph.planner.profile.regions import Atom, Profile
from zerograph.planner.programs.registers import SavedRegisters, SharedInstructions, options_of


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One piece of work of every coarse program with the same tiles, prefetch and recomputation.

    Attributes:
        compute: as it runs whole, where nothing is offloaded.
        region: that it belongs to; ``first`` and ``last`` say whether it begins and ends that.
        intervals: those that start before it.
        ready: buckets whose last gradient it makes.
        slices: how many slices it runs in, one after another; more than 1 where it works on tiles.
        reads, makes: tiled buckets that it reads, and whose gradient it makes.
        made: registers of the full gradients that it makes of buckets that are not tiled.
        work: what it computes; without what it holds of its own where it runs in slices.
        temporary: bytes that it holds of its own.
    """

    compute: Compute
    region: int
    first: bool
    last: bool
    intervals: tuple[int, ...]
    ready: tuple[int, ...]
    slices: int = 1
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    work: int = 0
    temporary: int = 0


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """Forward or backward, divided.

    Attributes:
        regions: in order.
        gathers: interval -> those whose gather begins at its start.
        frees: interval, or their number for the end -> those freed at its start.
        gradients: bucket -> registers of the full gradients that its reduction reads.
    """

    name: Phase
    regions: tuple[int, ...]
    pieces: tuple[Piece, ...]
    intervals: tuple[UnshardedInterval, ...]
    gathers: Mapping[int, Sequence[int]]
    frees: Mapping[int, Sequence[int]]
    gradients: Mapping[int, tuple[int, ...]]


class Division:
    """Divides the phases of a step whose buckets hold the same parameters."""

    def __init__(
        self, profile: Profile, names: Sequence[str], bucket_of: Mapping[str, int], shared: SharedInstructions
    ) -> None:
        self.profile, self.names, self.shared = profile, names, shared
        self._bucket_of = bucket_of
        self._parts: dict[tuple[int, int], list[_RegionPart]] = {}
        self._held: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}

    def phases(
        self, tiles: tuple[int, ...], prefetch: int, options: tuple[int, ...], saved: SavedRegisters
    ) -> Iterator[PhaseWork]:
        """Forward and backward, where every bucket has so many ``tiles`` and every layer is at that option."""
        at = options_of(self.profile, options)
        forward, backward = (
            tuple(k for k, region in enumerate(self.profile.regions) if region.phase == name)
            for name in ("forward", "backward")
        )
        # A loss in tiles makes gradients in the forward, which the backward scales and reduces.
        first = _Phase(self, forward, at, tiles, prefetch, saved).work("forward", reduces=False)
        yield first
        if self.profile.training:
            made_before = first.gradients
            yield _Phase(self, backward, at, tiles, prefetch, saved, made_before).work("backward", reduces=True)

    def parts(self, region: int, option: int) -> list[_RegionPart]:
        """The work of a region, divided where buckets are first read."""
        key = (region, option)
        if key not in self._parts:
            self._parts[key] = _parts(self.profile.regions[region].work[option].atoms, self._bucket_of)
        return self._parts[key]

    def held(self, region: int, option: int, saved: SavedRegisters) -> Sequence[int]:
        """By interval of a region's memory, the most bytes that it holds beyond those that were there before, and
        beyond what it makes for other regions but for gradients."""
        begins, ends = saved.begins.get(region, ()), saved.ends.get(region, ())
        key = (region, option, begins, ends)
        if key not in self._held:
            lives = (life.members for register in ends for life in saved.lives[register] if life.start != region)
            memory = self.profile.regions[region].work[option].memory
            made = sum(life.made for register in begins for life in saved.lives[register])
            self._held[key] = [size - made for size in memory.held(chain.from_iterable(lives))]
        return self._held[key]


@dataclass(frozen=True, slots=True)
class _RegionPart:
    """Consecutive atoms that read the same buckets; ``gradients`` are bytes by bucket, ``end`` is the last atom's."""

    buckets: tuple[int, ...]
    cost: Cost
    gradients: dict[int, int]
    end: int


def _parts(atoms: Sequence[Atom], bucket_of: Mapping[str, int]) -> list[_RegionPart]:
    parts: list[_RegionPart] = []
    for atom in atoms:
        buckets = tuple(dict.fromkeys(bucket_of[name] for name in atom.params))
        gradients = _sums((bucket_of[name], size) for name, size in atom.gradients)
        # It reads nothing that the part before has not made whole, so no interval can begin here.
        if parts and set(buckets) <= set(parts[-1].buckets):
            old = parts.pop()
            gradients = _sums(chain(gradients.items(), old.gradients.items()))
            parts.append(_RegionPart(old.buckets, Cost.of(old.cost, atom.cost), gradients, atom.end))
        else:
            parts.append(_RegionPart(buckets, atom.cost, gradients, atom.end))
    return parts


class _Phase:
    """Consecutive regions that are divided: each piece is one or several of their parts."""

    def __init__(
        self, division: Division, regions: tuple[int, ...], options: Sequence[int], tiles: tuple[int, ...],
        prefetch: int, saved: SavedRegisters, made_before: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """
        Args:
            made_before: bucket -> registers of full gradients that are there.
        """
        self._division, self._shared, self._regions, self._options = division, division.shared, regions, options
        self._tiles, self._prefetch, self._saved = tiles, prefetch, saved
        self._tiled = frozenset(bucket for bucket, count in enumerate(tiles) if count > 1)
        self._parts = [(k, part) for k in regions for part in division.parts(k, options[k])]
        first_of: dict[int, int] = {}
        self._begins = [first_of.setdefault(k, i) for i, (k, _) in enumerate(self._parts)]  # of each part's region
        self._intervals = unsharded_intervals([part.buckets for _, part in self._parts], self._begins, prefetch)
        self._gradients = dict(made_before)

    def work(self, name: Phase, *, reduces: bool) -> PhaseWork:
        """All of it; one that ``reduces`` gradients does so with those that were made before, too."""
        starting = _by_place(enumerate(interval.start for interval in self._intervals))
        complete = self._complete() if reduces else {}
        pieces = tuple(
            self._piece(
                begin,
                end,
                tuple(starting.get(begin, ())),
                tuple(bucket for at in range(begin, end) for bucket in complete.get(at, ())),
            )
            for begin, end in pairwise((*self._cuts(), len(self._parts)))
        )
        frees = _by_place(enumerate(interval.freed for interval in self._intervals))
        gathers = gathers_by_start(self._intervals, self._prefetch, ())
        return PhaseWork(name, self._regions, pieces, self._intervals, gathers, frees, self._gradients)

    def _cuts(self) -> list[int]:
        """The parts with which pieces begin."""
        # Work on tiles runs in slices, so that it is cut off from what stands before it and behind it.
        alone = [
            i
            for i, (_, part) in enumerate(self._parts if self._tiled else ())
            if not self._tiled.isdisjoint((*part.buckets, *part.gradients))
        ]
        behind = (i + 1 for i in alone if i + 1 < len(self._parts))
        return sorted({*self._begins, *(interval.start for interval in self._intervals), *alone, *behind})

    def _complete(self) -> dict[int, list[int]]:
        """By part the buckets whose last gradient it makes, which can be reduced then."""
        last_made = dict.fromkeys(self._gradients, 0)
        for i, (_, part) in enumerate(self._parts):
            last_made |= dict.fromkeys(part.gradients, i)
        return _by_place((bucket, at) for bucket, at in last_made.items() if bucket not in self._tiled)

    def _piece(self, begin: int, end: int, intervals: tuple[int, ...], complete: tuple[int, ...]) -> Piece:
        """The parts from ``begin`` to ``end``, all of one region."""
        k, inside = self._parts[begin][0], [part for _, part in self._parts[begin:end]]
        first, last = self._begins[begin] == begin, end == len(self._parts) or self._parts[end][0] != k
        gradients = _sums(chain.from_iterable(part.gradients.items() for part in inside))
        made = self._full_gradients(gradients)
        reads = tuple(bucket for part in inside for bucket in part.buckets if bucket in self._tiled)
        makes = tuple(bucket for bucket in gradients if bucket in self._tiled)
        slices = max((self._tiles[bucket] for bucket in (*reads, *makes)), default=1)
        outs = (*(self._saved.begins.get(k, ()) if first else ()), *made)
        dead = self._saved.ends.get(k, ()) if last else ()
        # What it makes can take the place of what dies with it alone. In slices what it holds lives from the first to
        # the last: the coarse program has a register for it.
        ending = sum(self._shared.registers.contents[register].bytes for register in dead) if slices == 1 else 0
        temporary = max(self._temporary(begin, end), -ending)
        cost = Cost.of(*(part.cost for part in inside))
        work = self._shared.segment(cost, temporary if slices == 1 else 0, slices)
        region = self._division.profile.regions[k]
        compute = self._shared.compute(work, outs, dead, region.module, region.source, (), region.token_tiles)
        return Piece(compute, k, first, last, intervals, complete, slices, reads, makes, made, work, temporary)

    def _full_gradients(self, sizes: Mapping[int, int]) -> tuple[int, ...]:
        """The registers of full gradients of so many bytes, of buckets that are not tiled."""
        made = list[int]()
        for bucket, size in sizes.items():
            if bucket not in self._tiled:
                before = self._gradients.get(bucket, ())
                key, text = ("full", bucket, len(before), size), f"full gradient of {self._division.names[bucket]}"
                made.append(self._shared.registers.get(key, text, size, "gradient", bucket=bucket))
                self._gradients[bucket] = (*before, made[-1])
        return tuple(made)

    def _temporary(self, begin: int, end: int) -> int:
        """The most bytes that the parts from ``begin`` to ``end`` hold of their own."""
        k, begins = self._parts[begin][0], self._begins[begin]
        option = self._options[k]
        intervals = self._division.profile.regions[k].work[option].memory.begins
        since = self._parts[begin - 1][1].end if begin > begins else 0
        held = self._division.held(k, option, self._saved)
        most = max(held[bisect_left(intervals, since) : bisect_left(intervals, self._parts[end - 1][1].end)])
        return most - sum(size for _, part in self._parts[begins:end] for size in part.gradients.values())


def _sums(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """By bucket the bytes of all ``sizes``."""
    found: dict[int, int] = {}
    for bucket, size in sizes:
        found[bucket] = found.get(bucket, 0) + size
    return found


def _by_place(places: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """By place, what has it."""
    found: dict[int, list[int]] = {}
    for each, place in places:
        found.setdefault(place, []).append(each)
    return found
