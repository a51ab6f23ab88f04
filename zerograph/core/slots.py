"""The slots that states on NVMe pass through, on the tier that NVMe reads and writes: made once, and used in turn."""

from __future__ import annotations

SLOTS = 3
"""One being read, one in use, one being written."""

SLOT = 64 * 2**20
"""Bytes of one slot, at most."""

MOST_KINDS = 7
"""That an update has of the parameters of a bucket at a time: they themselves, their gradients, masters, copies, and at
most three moments."""

ITEM = 4
"""Bytes of an element of any of these, at most."""


def slot_bytes(elements: int, most: int | None = None) -> int:
    """Bytes of one slot where the largest bucket on NVMe has so many ``elements`` on this rank."""
    return min(SLOT if most is None else most, MOST_KINDS * ITEM * elements)
