"""The search of a step so deep that a simulation of it takes long.

Plans are judged by few layers (:mod:`~zerograph.planner.search.few_layers`), and only those that may be the best within
a budget are simulated whole. Some levels of every tier are taken as references, and from the fastest plan within them
decisions are changed one after another, for as long as that makes it faster. References follow from what plans hold: no
budget enters.

It looks where everything is open, and where one thing is fixed: a local search may miss what it finds with less to
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from zerograph.planner.search.decisions import Decision, between, first_of, spread
from zerograph.planner.search.search_space import Candidate, SearchSpace, frontier
from zerograph.sim.simulate import Peaks

Decisions = Mapping[SearchSpace, Sequence[Decision]]
Look = tuple[Decisions, Decisions]
"""The decisions of plans that stay on the device, and of all plans."""
LEVELS = 4, 3, 2
"""Levels of each tier that references are made of, at most."""
STAYING, LEAVING, LEAVING_LARGE = (16, 8), (100, 30), (140, 60)
"""Plans that are looked at from references and between two others: of those that stay on the device, of all, and of all
of a large step, which is looked at in fewer ways."""
ROUNDS = 2
"""Times that what lies between is halved."""
ALIKE = 0.02
"""The slower of two plans is simulated whole where it holds so much less of a tier."""
CLOSE = 0.003
"""By how much a plan may be faster than few layers say."""
ROOM = 0.03
"""By how much it may hold less."""


class DeepSearch:
    """The plans that no other beats, judged by few layers."""

    def __init__(self, looks: Sequence[Look], leaving: tuple[int, int] = LEAVING) -> None:
        """
        Args:
            looks: where to look: with everything open, and with one thing fixed.
            leaving: plans that each looks at that leave the device.
        """
        found: dict[Candidate, None] = {}
        for staying, decisions in looks:
            own = _explored(staying, (), STAYING)
            found |= dict.fromkeys(own)
            found |= dict.fromkeys(_explored(decisions, frontier(own), leaving))
        self._rough = sorted(frontier(found), key=lambda c: c.rank)

    def within(self, most: Sequence[int]) -> Candidate | None:
        """The fastest whose peaks are at most ``most``; None when none is."""
        best: Candidate | None = None
        for rough in self._rough:
            if best is not None and rough.seconds * (1 - CLOSE) > best.seconds:
                break
            if all(peak * (1 - ROOM) <= limit for peak, limit in zip(rough.peaks, most, strict=True)):
                full = rough.space.full_of(rough)
                if full.fits(most) and (best is None or full.rank < best.rank):
                    best = full
        # Where few layers say too much of a tier, no plan seemed to fit.
        return best or min((c for c in self.best() if c.fits(most)), key=lambda c: c.rank, default=None)

    def best(self) -> list[Candidate]:
        """All of them, simulated whole, but for those that hold hardly less than faster ones."""
        kept: list[Candidate] = []
        for rough in self._rough:
            limits = [peak * (1 + ALIKE) for peak in rough.peaks]
            if not any(all(a <= b for a, b in zip(other.peaks, limits, strict=True)) for other in kept):
                kept.append(rough)
        return frontier(rough.space.full_of(rough) for rough in kept)


def _explored(decisions_of: Decisions, known: Sequence[Candidate], most: tuple[int, int]) -> list[Candidate]:
    if not decisions_of:
        return []
    found = dict.fromkeys(known)
    found |= dict.fromkeys(first_of(decisions_of))
    end = len(found) + most[0]
    for one in _descents(decisions_of, found):
        found[one] = None
        if len(found) >= end:
            break
    end = len(found) + most[1]
    for one in between(decisions_of, lambda: frontier(found), ROUNDS):
        found[one] = None
        if len(found) >= end:
            break
    return list(found)


def _descents(decisions_of: Decisions, found: Mapping[Candidate, None]) -> Iterator[Candidate]:
    """The candidates that the descents within each reference look at; ``found`` grows meanwhile."""
    for most in spread(_references(frontier(found))):
        now, before = min(found, key=lambda c: _within(c, most)), None
        while now is not before:
            before = now
            for decision in decisions_of.get(now.space, ()):
                # One decision after another, for as long as that finds something better.
                tried = [now.space.of(plan) for plan in decision.changes(now.plan, 1)]
                yield from tried
                now = min((now, *tried), key=lambda c: _within(c, most))


def _references(found: Sequence[Candidate]) -> list[Peaks]:
    levels = []
    for count, peaks in zip(LEVELS, zip(*(c.peaks for c in found), strict=True), strict=True):
        own = sorted(set(peaks))
        levels.append(sorted({own[i * (len(own) - 1) // (count - 1)] for i in range(count)}, reverse=True))
    return list(product(*levels))


def _within(candidate: Candidate, most: Peaks) -> tuple[object, ...]:
    """Orders plans within ``most`` by their seconds, before all others."""
    excess = max((peak - limit) / max(1, limit) for peak, limit in zip(candidate.peaks, most, strict=True))
    return max(0.0, excess), candidate.rank
