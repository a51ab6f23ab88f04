"""A deep step from two smaller depths of it: equal layers cost the same each, so that their difference is continued."""

from __future__ import annotations

import sys
from bisect import bisect_right

from zerograph.core.machine import TIERS
from zerograph.sim.costs import Memory
from zerograph.sim.tasks import Tasks

Moment = tuple[float, int, int]
"""A time, with the order of what happens then (:data:`~zerograph.sim.simulate.Event`)."""
START: Moment = (-1.0, 0, 0)


def peaks_by_part(run: Tasks, held: Memory) -> list[list[tuple[int, Moment]]]:
    """By tier and part of a step, the most bytes that are held, and when. ``held`` is there all the time.

    The parts are the forward, the halves of the backward, and the update; an inference is a forward alone. A peak lies
    at one end of each: in the backward activations go and gradients come, so many per layer. At every depth it stays
    there, where the largest of all may move from one part to another.
    """
    first = [*run.programs[1:], sys.maxsize, sys.maxsize]
    begins = (first[0], (first[0] + first[1]) // 2, first[1])
    found = []
    for tier in TIERS:
        level = sum(size for at, size in held if at == tier)
        peaks = [(level, START), (0, START), (0, START), (0, START)]
        for time, order, task, size in sorted(run.events[tier]):
            level += size
            part = bisect_right(begins, task)
            if level > peaks[part][0]:
                peaks[part] = level, (time, order, task)
        found.append(peaks)
    return found


def continued(less: float, more: float, times: float) -> float:
    """The value, ``times`` as many layers on, of a number that is ``less`` at one depth and ``more`` at another."""
    return more + (more - less) * times
