"""The memory that moves between tiers pass through: how many are under way, and how large their slots are.

Runtime, optimizers and planner share these numbers, so that a plan counts the slots that a step holds.
"""

from __future__ import annotations

SLOTS = 3
"""Slots of a ring, each for one bucket, tile or layer: one being read, one in use, one being written."""

LEAVING = 2
"""Moves off the device that are under way at most: what they move is memory of the device until they end."""

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
