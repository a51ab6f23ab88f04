"""Which parts of an arena are taken: aligned, disjoint, first fit, and neighbours that become free are one again."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ALIGNMENT = 4096
"""Bytes: of a page, so that an extent can be mapped, and enough for direct I/O on any disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """``bytes`` of an arena from ``offset``; up to ``offset + room`` nothing else is stored.

    Equal to itself alone: one that was freed is not the one that has its place later.
    """

    offset: int
    bytes: int

    @property
    def room(self) -> int:
        """Bytes that are taken: whole pages."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


class FreeList:
    """The free ranges of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (begin, end), sorted, never adjacent
        self._taken: set[Extent] = set()

    @property
    def free(self) -> int:
        """Bytes that are not taken; not necessarily in one piece."""
        return sum(end - begin for begin, end in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that still fits."""
        return max((end - begin for begin, end in self._free), default=0)

    def take(self, size: int) -> Extent | None:
        """An extent for ``size`` bytes, or None where no free range is large enough."""
        wanted = Extent(0, size).room
        if wanted == 0:
            return Extent(0, 0)
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= wanted:
                self._free[place : place + 1] = [(begin + wanted, end)] if end - begin > wanted else []
                extent = Extent(begin, size)
                self._taken.add(extent)
                return extent
        return None

    def give(self, extent: Extent) -> None:
        """Take ``extent`` back.

        Raises:
            ValueError: it was not taken here, or was given back before.
        """
        if extent.bytes == 0:
            return
        if extent not in self._taken:
            raise ValueError(f"{extent} is not of this arena, or was freed before")
        self._taken.remove(extent)
        begin, end = extent.offset, extent.offset + extent.room
        place = bisect_left(self._free, (begin, end))
        first = last = place
        if place > 0 and self._free[place - 1][1] == begin:
            first, begin = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            last, end = place + 1, self._free[place][1]
        self._free[first:last] = [(begin, end)]

    def __contains__(self, extent: Extent) -> bool:
        return extent.bytes == 0 or extent in self._taken
