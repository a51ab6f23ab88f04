"""Curves and shares as a line of characters: Unicode blocks, or ASCII where the output cannot."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

BLOCKS, ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
BAR, ASCII_BAR = "█░", "#."


def sparkline(curve: Sequence[tuple[float, int]], seconds: float, width: int, blocks: str = BLOCKS) -> str:
    """The levels of ``curve`` over ``seconds``, the highest one full height.

    A character stands for the highest level in its part of the time, so that no peak is lost; only what is 0 all the
    while is blank.
    """
    levels = [_highest(curve, seconds * i / width, seconds * (i + 1) / width) for i in range(width)]
    top = max(levels, default=0) or 1
    return "".join(blocks[-(-max(level, 0) * (len(blocks) - 1) // top)] for level in levels)


def _highest(curve: Sequence[tuple[float, int]], start: float, end: float) -> int:
    """The highest level from ``start`` to before ``end``."""
    first = max(bisect_right(curve, start, key=_time) - 1, 0)
    return max((level for _, level in curve[first : max(bisect_left(curve, end, key=_time), first + 1)]), default=0)


def _time(point: tuple[float, int]) -> float:
    return point[0]


def bar(share: float, width: int, characters: str = BAR) -> str:
    """``share`` (0 to 1) of ``width`` filled."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return characters[0] * filled + characters[1] * (width - filled)
