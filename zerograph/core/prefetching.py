"""Which uses of a bucket one gather serves, and how far ahead it begins. No torch in here.

These are the rules that the passes ``gather`` and ``prefetch`` carry out and that the planner counts with.
"""

from __future__ import annotations

from collections.abc import Sequence


def visit_numbers(uses: Sequence[int], prefetch: int) -> list[int]:
    """For each use of a bucket, in order, the number of the visit it belongs to.

    A bucket whose next use lies beyond ``prefetch`` other buckets is freed and gathered again: another visit.
    """
    numbers: list[int] = []
    latest: dict[int, int] = {}  # bucket -> its last use
    count = 0
    for i, bucket in enumerate(uses):
        if bucket in latest and not _more_than(prefetch, uses, latest[bucket] + 1, i):
            numbers.append(numbers[latest[bucket]])
        else:
            numbers.append(count)
            count += 1
        latest[bucket] = i
    return numbers


def _more_than(limit: int, uses: Sequence[int], first: int, end: int) -> bool:
    """Whether ``uses[first:end]`` are of more than ``limit`` buckets; looks no further than it takes."""
    between: set[int] = set()
    for i in range(first, end):
        between.add(uses[i])
        if len(between) > limit:
            return True
    return False


def gather_starts(
    buckets: Sequence[object], ends: Sequence[int], distance: int, ahead: Sequence[int] | None = None
) -> list[int]:
    """For each visit, the one at whose start its gather may begin, with at most ``distance + 1`` buckets whole.

    Args:
        buckets: what each visit makes whole.
        ends: for each visit, the number of the visit at whose start it is freed.
        ahead: for each visit, how many visits before its own its gather begins, at most; ``distance`` unless told.

    One pass over the visits: gathers start at most ``distance`` visits early, so what is whole before that is settled.
    """
    starts: list[int] = []
    change = [0] * (len(ends) + 1)  # at the start of each visit, buckets gathered less buckets freed
    freed: dict[object, int] = {}  # where the last visit of a bucket ended: no bucket is gathered twice at a time
    settled, whole_before = 0, 0
    for i, (bucket, end) in enumerate(zip(buckets, ends, strict=True)):
        for at in range(settled, i - distance):
            whole_before += change[at]
        settled = max(settled, i - distance)
        start, whole = max(freed.get(bucket, 0), settled), whole_before
        start = max(start, i - ahead[i]) if ahead is not None else start
        for at in range(settled, i):
            whole += change[at]
            if whole > distance:
                start = max(start, at + 1)
        start = min(start, i)
        change[start] += 1
        change[end] -= 1
        freed[bucket] = end
        starts.append(start)
    return starts
