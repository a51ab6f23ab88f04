"""Diffs of graphs: they turn one text into the other, and a moved line is one change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.files.linediff import unified

LINES = st.lists(st.sampled_from("abcdefgh"), max_size=12)
PAIRS = st.tuples(LINES, LINES) | LINES.map(lambda lines: (lines, lines))


def applied(before: list[str], diff: list[str]) -> list[str]:
    """``before`` with ``diff`` applied as ``patch`` would, by its line numbers."""
    found, at = [], 0
    for line in diff[2:]:
        mark, text = line[0], line[1:]
        if mark == "@":
            start, _, length = line.split()[1].removeprefix("-").partition(",")
            begin = int(start) - (length != "0")
            found += before[at:begin]
            at = begin
            continue
        if mark != "+":
            assert before[at] == text
            at += 1
        if mark != "-":
            found.append(text)
    return found + before[at:]


@given(PAIRS, st.integers(0, 3))
def test_a_diff_turns_one_text_into_the_other(texts: tuple[list[str], list[str]], context: int) -> None:
    before, after = texts
    diff = list(unified(before, after, context))
    assert applied(before, diff) == after
    assert bool(diff) == (before != after)


def test_a_moved_line_is_one_line_less_and_one_more() -> None:
    diff = list(unified(list("abcdefgh"), list("acdefgbh"), 1))
    expected = ["--- before", "+++ after", "@@ -1,3 +1,2 @@", " a", "-b", " c", "@@ -7,2 +6,3 @@", " g", "+b", " h"]
    assert diff == expected
