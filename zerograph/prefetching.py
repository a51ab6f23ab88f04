"""How far ahead gathers begin: the rule that the pass carries out and the planner counts with. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence


def gather_starts(buckets: Sequence[object], ends: Sequence[int], distance: int) -> list[int]:
    """For each visit, the one at whose start its gather may begin, with at most ``distance + 1`` buckets whole.

    Args:
        buckets: what each visit makes whole.
        ends: for each visit, the number of the visit at whose start it is freed.

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
