"""Unified diffs of texts whose lines are unique, as those of a graph are, in about linear time.

``difflib`` looks for the longest common stretch again and again, which takes seconds for the graph of a deep model.
This is the core of patience diff (Bram Cohen): lines that occur once on both sides match, and of those that moved
against each other the fewest count as changed.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence


def unified(before: Sequence[str], after: Sequence[str], context: int) -> Iterator[str]:
    """The lines of the diff from ``before`` to ``after``; none if they are equal."""
    if before == after:
        return  # lines that repeat match nothing, and would be printed as changed
    # difflib's grouping of changes, on top of matching blocks of our own.
    matcher = _Matcher(None, before, after, autojunk=False)
    header = ["--- before", "+++ after"]
    for group in matcher.get_grouped_opcodes(context):
        yield from header
        header = []
        (_, i, _, j, _), (_, _, i_end, _, j_end) = group[0], group[-1]
        yield f"@@ -{_range(i, i_end)} +{_range(j, j_end)} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (f" {line}" for line in before[i1:i2])
                continue
            yield from (f"-{line}" for line in before[i1:i2])
            yield from (f"+{line}" for line in after[j1:j2])


class _Matcher(difflib.SequenceMatcher[str]):
    a: Sequence[str]
    b: Sequence[str]

    def get_matching_blocks(self) -> list[difflib.Match]:
        blocks: list[difflib.Match] = []
        for i, j in _rising(_unique_pairs(self.a, self.b)):
            last = blocks[-1] if blocks else None
            if last is not None and (last.a + last.size, last.b + last.size) == (i, j):
                # Neighbours merge: difflib expects maximal blocks.
                blocks[-1] = difflib.Match(last.a, last.b, last.size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
        return [*blocks, difflib.Match(len(self.a), len(self.b), 0)]


def _unique_pairs(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Where lines stand that occur once in ``a`` and once in ``b``, by their place in ``a``."""
    in_a, in_b = Counter(a), Counter(b)
    place = {line: j for j, line in enumerate(b)}
    return [(i, place[line]) for i, line in enumerate(a) if in_a[line] == in_b[line] == 1]


def _rising(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most of ``pairs`` whose second places rise too: a longest increasing subsequence."""
    ends: list[int] = []  # the lowest place in which a sequence of each length ends
    last: list[int] = []  # and the pair that it ends with
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1], last[length : length + 1] = [j], [n]
    found = []
    n = last[-1] if last else -1
    while n >= 0:
        found.append(pairs[n])
        n = before[n]
    return found[::-1]


def _range(start: int, stop: int) -> str:
    """Lines as unified diffs count them: from 1, an empty range by the line before it, a length of 1 left out."""
    length = stop - start
    return f"{start + 1}" if length == 1 else f"{start + (length > 0)},{length}"
