"""Which parts of an arena are taken: aligned, disjoint, first fit, and whole again when all are given back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.runtime.offload.extents import ALIGNMENT, Extent, FreeList


@given(st.lists(st.one_of(st.integers(0, 40_000), st.none()), max_size=60))
def test_extents_are_aligned_disjoint_and_merge_when_freed(steps: list[int | None]) -> None:
    space, taken = FreeList(64 * ALIGNMENT), []
    for step in steps:
        if step is None:
            if taken:
                space.give(taken.pop(len(taken) // 2))
        elif (extent := space.take(step)) is not None:
            assert extent.offset % ALIGNMENT == 0
            taken.append(extent)
        else:
            assert space.largest < step
        spans = sorted((e.offset, e.offset + e.room) for e in taken if e.room)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert space.free == space.size - sum(e.room for e in taken)
    for extent in taken:
        space.give(extent)
    assert space.largest == space.free == space.size


def test_the_first_range_that_is_large_enough_is_taken() -> None:
    space = FreeList(8 * ALIGNMENT)
    a, b, c, d = (space.take(pages * ALIGNMENT) for pages in (2, 1, 1, 4))
    assert a and b and c and d and space.free == 0 and space.take(1) is None
    space.give(a)
    space.give(c)
    one = space.take(1)
    assert one is not None and (one.offset, one.room) == (0, ALIGNMENT)
    two = space.take(ALIGNMENT + 1)
    assert two is None, "two pages are free, and not in one piece"
    assert (space.free, space.largest) == (2 * ALIGNMENT, ALIGNMENT)


def test_nothing_takes_no_room() -> None:
    space = FreeList(0)
    nothing = space.take(0)
    assert nothing is not None and (nothing.bytes, nothing.room) == (0, 0) and nothing in space
    space.give(nothing)
    assert space.take(1) is None and space.largest == space.free == 0


def test_only_what_is_taken_can_be_given_back_and_once() -> None:
    space, other = FreeList(4 * ALIGNMENT), FreeList(4 * ALIGNMENT)
    extent, foreign = space.take(100), other.take(100)
    assert extent is not None and foreign is not None
    assert extent in space and foreign not in space
    with pytest.raises(ValueError, match="not of this arena, or was freed before"):
        space.give(foreign)
    space.give(extent)
    again = space.take(100)
    assert again is not None and (again.offset, again.bytes) == (extent.offset, extent.bytes)
    assert again in space and extent not in space
    for wrong in (extent, Extent(0, 100)):
        with pytest.raises(ValueError, match="freed before"):
            space.give(wrong)
    assert space.free == 3 * ALIGNMENT
