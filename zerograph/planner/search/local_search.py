"""The local search: from the best plans it changes one decision at a time, until nothing better is found."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from zerograph.core.plan import Plan
from zerograph.planner.search.decisions import Decision, between, first_of, spread
from zerograph.planner.search.peaks import with_lower_peaks
from zerograph.planner.search.search_space import Candidate, SearchSpace

HALVINGS = 3
"""Times that what lies between two neighbours of the frontier is halved."""
GROUPS = 4
"""Groups of items that a decision is changed for, beside all of them."""
FEW = 8
"""Buckets up to which items are changed one by one."""
LOWERED = 6
"""Plans whose peaks are lowered, of those that stay and of those that leave the device."""
COMPLETE = 1300
"""Plans up to which all are looked at, but for what only says when something begins."""
COARSE = 48
"""Plans that are looked at with decisions changed for all items at once, however deep the step; the rest follows."""
WORK = 60_000
"""About how many tasks are simulated of plans that stay on the device, and then of all, from the first plans on."""


class LocalSearch:
    """The local search: what it has found, and what it goes on from.

    Attributes:
        best: of all plans so far those that no other beats.
    """

    def __init__(self) -> None:
        self.best: list[Candidate] = []
        self._seen: set[Candidate] = set()
        self._beaten: deque[Candidate] = deque()

    def explore(
        self, decisions_of: Mapping[SearchSpace, Sequence[Decision]], work: int, *, groups: int = 0, tile: bool = False
    ) -> None:
        """Look at plans of these spaces, from the first ones on and from what is known of them.

        Args:
            groups: of items that decisions of deep steps are changed for, beside all of them; 0 for none.
            tile: whether operators may be tiled to lower a peak.
        """
        for candidate in first_of(decisions_of):
            self._add(candidate)
        few = all(len(space.plan.buckets) <= FEW for space in decisions_of)
        coarse = {space: [decision for decision in own if not decision.fine] for space, own in decisions_of.items()}
        # Decisions are independent: the plans of a space are the product of all choices.
        complete = sum(prod(len(c) for k in own for c in k.choices.values()) for own in coarse.values()) <= COMPLETE
        for space, own in coarse.items() if complete else ():
            for plan in every(own, space.plan):
                self._add(space.of(plan))
        # Four ways of looking share the work: all items at once, halves of what differs, groups of items, lower peaks.
        self._change(decisions_of, 1, work // 4)
        self._halve(decisions_of, work // 4)
        if few or groups:
            self._change(coarse, sys.maxsize if few else groups, work // 4)
        for candidate in with_lower_peaks(spread(self._by_memory())[:LOWERED], tile=tile, work=work // 4):
            self._add(candidate)
        if few:
            self._change(decisions_of, sys.maxsize, work // 4, beaten=not complete)

    def _by_memory(self) -> list[Candidate]:
        return sorted(self.best, key=lambda c: c.peaks)

    def _add(self, candidate: Candidate) -> None:
        # Candidates compare by identity, and a space makes one for each plan.
        if candidate in self._seen:
            return
        self._seen.add(candidate)
        better = next((other for other in self.best if other.beats(candidate)), None)
        if better is not None and (better.rank != candidate.rank or better.turned <= candidate.turned):
            self._beaten.append(candidate)
        else:
            best, self.best = self.best, [candidate]
            for other in best:
                # Kept all the same: a plan that is beaten may lead to one that is not.
                (self._beaten if candidate.beats(other) else self.best).append(other)

    def _change(
        self, decisions_of: Mapping[SearchSpace, Sequence[Decision]], groups: int, work: int, *, beaten: bool = False
    ) -> None:
        """Change single decisions of the best plans, evenly spread over their memory, until that finds nothing better;
        then of those that were ``beaten``, which may lead on."""
        end, enough = work + _work(decisions_of), len(self._seen) + (COARSE if groups == 1 else 0)
        done: set[Candidate] = set()
        while True:
            fresh = [c for c in spread(self._by_memory()) if c not in done]
            if not fresh and beaten and self._beaten:
                fresh = [self._beaten.popleft()]
            if not fresh:
                return
            for candidate in fresh:
                done.add(candidate)
                if not beaten and candidate not in self.best:
                    continue  # something better was found meanwhile
                for plan in neighbours(decisions_of.get(candidate.space, ()), candidate.plan, groups):
                    self._add(candidate.space.of(plan))
                    if _work(decisions_of) >= end and len(self._seen) >= enough:
                        return

    def _halve(self, decisions_of: Mapping[SearchSpace, Sequence[Decision]], work: int) -> None:
        """Look between neighbours among the best plans of a space."""
        end = work + _work(decisions_of)
        for candidate in between(decisions_of, self._by_memory, HALVINGS):
            self._add(candidate)
            if _work(decisions_of) >= end:
                return


def _work(spaces: Iterable[SearchSpace]) -> int:
    return sum(space.work for space in spaces)


def every(decisions: Sequence[Decision], plan: Plan) -> Iterator[Plan]:
    """``plan`` with every choice of every item of ``decisions``."""
    if not decisions:
        yield plan
        return
    decision, *rest = decisions
    for values in product(*decision.choices.values()):
        yield from every(rest, decision.apply(plan, dict(zip(decision.choices, values, strict=True))))


def neighbours(decisions: Iterable[Decision], plan: Plan, groups: int) -> Iterator[Plan]:
    """``plan`` with one decision changed, for one of so many groups of its items."""
    for decision in decisions:
        yield from decision.changes(plan, groups)
