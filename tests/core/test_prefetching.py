"""When buckets are gathered and freed: never more at a time than allowed, and as early as that allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.prefetching import (
    UnshardedInterval,
    gather_starts,
    gathers_by_start,
    interval_numbers,
    unsharded_intervals,
)

USES = st.lists(st.integers(0, 4), max_size=14)


def test_a_bucket_is_gathered_again_where_its_next_use_is_far() -> None:
    assert interval_numbers([], 1) == []
    assert interval_numbers([0, 0, 1, 0], 1) == [0, 0, 1, 0]
    assert interval_numbers([0, 1, 2, 0], 1) == [0, 1, 2, 3]
    assert interval_numbers([0, 1, 2, 0], 2) == [0, 1, 2, 0]
    assert interval_numbers([0, 1, 1, 1, 0], 1) == [0, 1, 1, 1, 0], "uses between are counted by bucket"
    assert interval_numbers([0, 1, 0], 0) == [0, 1, 2]


@given(USES, st.integers(0, 3))
def test_visits_are_numbered_in_order_and_are_of_one_bucket(uses: list[int], prefetch: int) -> None:
    numbers = interval_numbers(uses, prefetch)
    assert list(dict.fromkeys(numbers)) == list(range(len(set(numbers))))
    assert all(len({uses[i] for i, n in enumerate(numbers) if n == number}) == 1 for number in numbers)
    for i, number in enumerate(numbers):
        before = next((k for k in reversed(range(i)) if uses[k] == uses[i]), None)
        near = before is not None and len(set(uses[before + 1 : i])) <= prefetch
        assert near == (number in numbers[:i])


def test_a_gather_begins_as_far_ahead_as_others_leave_room() -> None:
    ends = [1, 2, 3, 4]  # each is freed where the next interval begins
    assert gather_starts("abcd", ends, 0) == [0, 1, 2, 3]
    assert gather_starts("abcd", ends, 1) == [0, 0, 1, 2]
    assert gather_starts("abcd", ends, 2) == [0, 0, 0, 1]
    assert gather_starts("abcd", ends, 2, ahead=[2, 0, 1, 2]) == [0, 1, 1, 1]
    assert gather_starts("abab", ends, 3) == [0, 0, 1, 2], "no bucket is gathered before it is freed"
    assert gather_starts("abc", [3, 2, 3], 1) == [0, 0, 2], "one that stays whole takes the place of one ahead"


@given(USES, st.integers(0, 3), st.data())
def test_never_more_buckets_are_unsharded_than_allowed(uses: list[int], prefetch: int, data: st.DataObject) -> None:
    """Unless intervals themselves need more at a time, as where several begin together."""
    found = unsharded_intervals([(bucket,) for bucket in uses], range(len(uses)), prefetch)
    ahead = data.draw(st.lists(st.integers(0, prefetch), min_size=5, max_size=5))
    begun = gathers_by_start(found, prefetch, ahead)
    starts = {interval: at for at, those in begun.items() for interval in those}
    assert sorted(starts) == list(range(len(found)))
    for i, interval in enumerate(found):
        assert max(0, i - ahead[interval.bucket]) <= starts[i] <= i
    for now in range(len(found)):
        unsharded = [i for i, interval in enumerate(found) if starts[i] <= now < interval.freed]
        needed = [i for i in unsharded if i <= now]
        assert len(unsharded) <= max(prefetch + 1, len(needed))
        assert len({found[i].bucket for i in unsharded}) == len(unsharded), "two gathers of one live bucket"


def test_a_visit_begins_with_its_layer() -> None:
    """Where a cut is free, if nothing in the layer is used before; else right before the first use."""
    uses = [(0,), (), (1,), (1, 2), ()]
    begins = [0, 1, 1, 1, 4]
    assert unsharded_intervals(uses, begins, 1) == (
        UnshardedInterval(0, 0, 0, 1),
        UnshardedInterval(1, 1, 3, 3),
        UnshardedInterval(2, 3, 3, 3),
    )


def test_what_is_read_by_the_last_piece_is_freed_at_the_end() -> None:
    assert unsharded_intervals([], [], 1) == ()
    assert unsharded_intervals([(0,), (1,), (0,)], [0, 1, 2], 1) == (
        UnshardedInterval(0, 0, 2, 2),
        UnshardedInterval(1, 1, 1, 2),
    )
