"""What a forecast says of its spans: how long the step is, how busy streams are, and what communication is exposed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.timeline import COMMUNICATION, STREAMS, WAIT, Forecast, Span, Stream

Part = tuple[Stream, float, float]


def forecast(*parts: Part) -> Forecast:
    return Forecast(tuple(Span(i, "", stream, a, b) for i, (stream, a, b) in enumerate(parts)), {}, {})


def test_a_step_without_tasks() -> None:
    empty = forecast()
    assert (empty.seconds, empty.busy(), empty.exposed_communication) == (0.0, {}, 0.0)


def test_a_step_is_as_long_as_its_last_task() -> None:
    step = forecast(("compute", 0, 3), ("reduce", 2, 7), ("compute", 3, 4))
    assert step.seconds == 7
    assert step.busy() == {"compute": 4, "reduce": 5}


def test_a_stream_that_waits_does_not_work() -> None:
    step = forecast(("gather", 0, 2), ("gather", 2, 5))
    waits = replace(step, spans=(replace(step.spans[0], what=WAIT), step.spans[1]))
    assert (waits.seconds, waits.busy(), waits.exposed_communication) == (5, {"gather": 3}, 3)


@pytest.mark.parametrize(
    ("parts", "exposed"),
    [
        ([("gather", 0, 2)], 2),
        ([("gather", 0, 2), ("compute", 0, 2)], 0),
        ([("gather", 0, 2), ("compute", 2, 4)], 2),
        ([("gather", 0, 4), ("compute", 1, 3)], 2),
        ([("gather", 0, 4), ("compute", 1, 2), ("compute", 3, 9)], 2),
        # Two collectives at a time are exposed once.
        ([("gather", 0, 3), ("reduce", 1, 4), ("compute", 2, 3)], 3),
        # What moves bytes between tiers works as much as what computes.
        ([("reduce", 0, 3), ("nvme_write", 0, 1), ("cpu_update", 1, 2)], 1),
        ([("gather", 1, 1), ("compute", 1, 1)], 0),
    ],
)
def test_communication_is_exposed_where_nothing_else_works(parts: list[Part], exposed: float) -> None:
    assert forecast(*parts).exposed_communication == exposed


@given(st.lists(st.tuples(st.sampled_from(STREAMS), st.integers(0, 20), st.integers(0, 5)), max_size=12))
def test_moment_by_moment_it_is_the_same(drawn: list[tuple[Stream, int, int]]) -> None:
    step = forecast(*((stream, start, start + length) for stream, start, length in drawn))

    def at(moment: int) -> set[Stream]:
        return {s.stream for s in step.spans if s.start <= moment < s.end}

    alone = [m for m in range(26) if at(m) and at(m) <= set(COMMUNICATION)]
    assert step.exposed_communication == len(alone)
