"""The largest size whose needs stay within what there is.

Needs only grow with a size, nearly in proportion: a straight line through what two sizes leave of the fullest tier says
which one to try next. Where that does not halve what lies between the largest size that fits and the smallest that does
not, it is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def furthest(over: Callable[[int], float | None], start: int, most: int, low: int = 0) -> int:
    """The largest size up to ``most`` that fits; ``low`` where none does.

    Args:
        over: by what share a size overruns what there is, 0 or less where it fits; None where there is no such size,
            nor any larger one. Every size is asked for once.
        start: the size to try first.
        low: a size that fits, or 0.
    """
    known: dict[int, float] = {}
    high, size, halve = most + 1, start, False
    while high - low > 1:
        width, share = high - low, over(size)
        if share is not None:
            known[size] = share
        low, high = (size, high) if share is not None and share <= 0 else (low, size)
        halve = not halve and width // 2 < high - low < most - low
        size = (low + high) // 2 if halve else _crossing(known, low, high, most)
    return low


def _crossing(known: Mapping[int, float], low: int, high: int, most: int) -> int:
    """Where needs meet what there is on a line through two sizes: those next to it on either side, or on one."""
    below, above = ([n for n in sorted(known) if n <= low], [n for n in sorted(known) if n >= high])
    ends = [*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]]
    if len(ends) == 2:
        near, far = ends
        if known[far] > known[near]:
            rise = (known[far] - known[near]) / (far - near)
            return min(max(near - int(known[near] / rise), low + 1), high - 1)
    # Nothing was too large yet: double.
    return min(2 * low, high - 1) if high > most else (low + high) // 2
