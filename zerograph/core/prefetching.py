"""Which uses of a bucket one gather serves, how far ahead it begins, and when the bucket is free. No torch in here.

These are the rules that the passes ``gather`` and ``prefetch`` carry out in a graph, and those of the planner for a
sequence of pieces of work (:func:`unsharded_intervals`): a bucket whose next use lies beyond ``prefetch`` other buckets
is freed and gathered again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


def interval_numbers(uses: Sequence[Hashable], prefetch: int) -> list[int]:
    """For each use of a bucket, in order, the number of the interval it belongs to.

    A bucket whose next use lies beyond ``prefetch`` other buckets is freed and gathered again: another interval.
    """
    numbers: list[int] = []
    latest: dict[Hashable, int] = {}  # bucket -> its last use
    count = 0
    for i, bucket in enumerate(uses):
        # Within the prefetch distance keeping the bucket costs no more memory than gathering ahead would.
        if bucket in latest and not _more_than(prefetch, uses, latest[bucket] + 1, i):
            numbers.append(numbers[latest[bucket]])
        else:
            numbers.append(count)
            count += 1
        latest[bucket] = i
    return numbers


def _more_than(limit: int, uses: Sequence[Hashable], first: int, end: int) -> bool:
    """Whether ``uses[first:end]`` are of more than ``limit`` buckets; looks no further than it takes."""
    between: set[Hashable] = set()
    for i in range(first, end):
        between.add(uses[i])
        if len(between) > limit:
            return True
    return False


def gather_starts(
    buckets: Sequence[object], ends: Sequence[int], distance: int, ahead: Sequence[int] | None = None
) -> list[int]:
    """For each interval, the one at whose start its gather may begin, with at most ``distance + 1`` buckets unsharded.

    Args:
        buckets: what each interval gathers.
        ends: for each interval, the number of the interval at whose start it is freed.
        ahead: for each interval, how many intervals before its own its gather begins, at most; ``distance`` unless
            told.

    One pass over the intervals: gathers start at most ``distance`` intervals early, so what is unsharded before that is
    fixed.
    """
    starts: list[int] = []
    change = [0] * (len(ends) + 1)  # at the start of each interval, buckets gathered less buckets freed
    freed: dict[object, int] = {}  # where the last interval of a bucket ended: no bucket is gathered twice at a time
    fixed, unsharded_before = 0, 0
    for i, (bucket, end) in enumerate(zip(buckets, ends, strict=True)):
        # No later gather begins before this point, so that what is unsharded there never changes again.
        for at in range(fixed, i - distance):
            unsharded_before += change[at]
        fixed = max(fixed, i - distance)
        start, unsharded = max(freed.get(bucket, 0), fixed), unsharded_before
        start = max(start, i - ahead[i]) if ahead is not None else start
        for at in range(fixed, i):
            unsharded += change[at]
            # One more would make `distance + 2` unsharded: the gather begins behind this interval.
            if unsharded > distance:
                start = max(start, at + 1)
        # At its own interval at the latest: a gather that finds no room simply does not run ahead.
        start = min(start, i)
        change[start] += 1
        change[end] -= 1
        freed[bucket] = end
        starts.append(start)
    return starts


@dataclass(frozen=True, slots=True)
class UnshardedInterval:
    """A stretch of work during which a bucket is unsharded.

    Attributes:
        bucket: which one.
        start: the piece of work before which it is waited for.
        last: the last piece of work that reads it.
        freed: the interval at whose start it is freed; the number of intervals for the end.
    """

    bucket: int
    start: int
    last: int
    freed: int


def unsharded_intervals(
    uses: Sequence[tuple[int, ...]], begins: Sequence[int], prefetch: int
) -> tuple[UnshardedInterval, ...]:
    """The unsharded intervals of a phase.

    Args:
        uses: the buckets that each piece of work reads, in order.
        begins: per piece, the first piece of the layer it belongs to, where a cut is free.
        prefetch: buckets gathered ahead, at most.
    """
    found = _stretches(uses, prefetch)
    starts = [_start(first, uses, begins) for _, first, _ in found]
    freed = []
    for i, (_, _, last) in enumerate(found):
        # At the next interval's start, not at once: frees stand where the graph is cut anyway, and cost no cut of their
        # own.
        freed.append(next((k for k in range(i + 1, len(found)) if starts[k] > last), len(found)))
    return tuple(UnshardedInterval(bucket, starts[i], last, freed[i]) for i, (bucket, _, last) in enumerate(found))


def gathers_by_start(found: Sequence[UnshardedInterval], prefetch: int, ahead: Sequence[int]) -> dict[int, list[int]]:
    """Visit -> those whose gathers begin at its start.

    Args:
        ahead: of each bucket, how many intervals before its own its gathers begin, at most; all ``prefetch`` unless
            told.
    """
    begin: dict[int, list[int]] = {}
    buckets = [interval.bucket for interval in found]
    limits = [ahead[bucket] for bucket in buckets] if ahead else None
    for i, start in enumerate(gather_starts(buckets, [interval.freed for interval in found], prefetch, limits)):
        begin.setdefault(start, []).append(i)
    return begin


def _stretches(uses: Sequence[tuple[int, ...]], prefetch: int) -> list[tuple[int, int, int]]:
    """Bucket, first and last piece of every interval, in order of the first."""
    sequence = [(piece, bucket) for piece, buckets in enumerate(uses) for bucket in buckets]
    found: dict[int, tuple[int, int, int]] = {}
    numbers = interval_numbers([bucket for _, bucket in sequence], prefetch)
    for number, (piece, bucket) in zip(numbers, sequence, strict=True):
        _, first, _ = found.get(number, (bucket, piece, piece))
        found[number] = (bucket, first, piece)
    return list(found.values())


def _start(first: int, uses: Sequence[tuple[int, ...]], begins: Sequence[int]) -> int:
    """With its layer, if nothing in that is used before, else right before its first use."""
    begin = begins[first]
    return first if any(uses[k] for k in range(begin, first)) else begin
