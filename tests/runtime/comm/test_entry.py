"""What ranks tell each other when they enter a program: names of collectives, and which difference is reported."""

from __future__ import annotations

from zerograph.core.errors import ZeroGraphError
from zerograph.runtime.comm.entry import Entry, describe_difference, reason_of, sequence_of


def test_a_sequence_tells_collectives_and_their_order_apart() -> None:
    assert sequence_of(["norm", "a"]) == sequence_of(iter(["norm", "a"]))
    assert len({sequence_of(names) for names in (["norm", "a"], ["a", "norm"], ["norm"], [])}) == 4
    assert sequence_of(["norm"]) < 2**60  # what the mailbox has room for


def test_different_numbers_of_steps_are_reported_before_different_programs() -> None:
    mine, theirs = Entry("forward of net", 1, 3), Entry("backward of net", 2, 4)
    text = str(describe_difference(mine, 1, theirs, 0))
    assert "rank 0 has taken 3 optimizer steps and rank 1 4" in text and "checkpoint" in text
    text = str(describe_difference(mine, 1, Entry("inference of net", 5, 3), 0))
    assert "rank 0 the forward of net, after 3 optimizer steps" in text and "rank 1 the inference of net" in text


def test_a_reason_is_one_line_without_the_hint() -> None:
    assert reason_of(ValueError("bad state")) == "ValueError: bad state"
    assert reason_of(ZeroGraphError("no room", "use less")) == "ZeroGraphError: no room"
    assert len(reason_of(ValueError("x" * 1000))) == 400
