"""How a dimension is divided among ranks, which is written here alone: as ``torch.chunk`` divides it."""

from __future__ import annotations

from collections.abc import Sequence


def is_divided(shape: Sequence[int], ranks: int) -> bool:
    """Whether a parameter of that ``shape`` is split by rows: there is one for each of ``ranks``. Others stay
    unsharded."""
    return len(shape) > 0 and shape[0] >= ranks


def largest(size: int, ranks: int) -> int:
    """The most that one of ``ranks`` has of a dimension of that ``size``."""
    return -(-size // ranks)


def rows_of(size: int, rank: int, ranks: int) -> slice:
    """The rows that ``rank`` has of ``size`` ones; none, at the end, where those before it have all."""
    most = largest(size, ranks)
    return slice(min(rank * most, size), min((rank + 1) * most, size))
