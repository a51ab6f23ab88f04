"""The simulation keeps streams in order, waits for what it must, and counts memory at every moment."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.simulate import Task, play
from zerograph.core.timeline import STREAMS, Forecast


def test_a_gather_travels_beside_compute_and_exposes_what_is_left() -> None:
    tasks = [
        Task("gather a", "gather", 2.0, takes=(("device", 10),)),
        Task("a", "compute", 3.0, after=(0,), gives=(("device", 10),)),
        Task("gather b", "gather", 4.0, takes=(("device", 30),)),
        Task("b", "compute", 1.0, after=(2,), gives=(("device", 30),)),
    ]
    forecast = play(tasks, held=(("device", 100),))
    assert [(s.start, s.end) for s in forecast.spans] == [(0, 2), (2, 5), (2, 6), (6, 7)]
    assert forecast.seconds == 7
    assert forecast.exposed_communication == 3
    assert forecast.busy() == {"gather": 6, "compute": 4}
    assert forecast.critical_path == (0, 2, 3)
    assert forecast.memory["device"] == ((0, 110), (2, 140), (5, 130), (7, 100))
    assert (forecast.peaks["device"].bytes, forecast.peaks["device"].name) == (140, "gather b")


def test_memory_that_one_task_takes_and_gives_counts_even_without_length() -> None:
    forecast = play([Task("a", "compute", 0.0, takes=(("host", 5),), gives=(("host", 5),))])
    assert forecast.peaks["host"].bytes == 5
    assert forecast.memory["host"][-1][1] == 0


def test_what_is_given_back_at_a_moment_is_there_for_the_next() -> None:
    tasks = [Task(n, "compute", 1.0, takes=(("device", 8),), gives=(("device", 8),)) for n in "abc"]
    assert play(tasks).peaks["device"].bytes == 8


def test_nothing_to_do() -> None:
    forecast = play([], held=(("device", 3),))
    assert forecast.seconds == 0
    assert forecast.peaks["device"].bytes == 3


def test_waiting_for_a_later_task_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"task 0 \(a\) waits for a later one"):
        play([Task("a", "compute", 1.0, after=(0,))])


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for index in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        size = draw(st.integers(0, 50))
        tasks.append(
            Task(
                f"t{index}",
                draw(st.sampled_from(STREAMS)),
                draw(st.integers(1, 5)),
                tuple(after),
                takes=(("device", size),),
                gives=(("device", size),),
            )
        )
    return tasks


@given(programs())
def test_any_program(tasks: list[Task]) -> None:
    forecast = play(tasks)
    spans = forecast.spans
    for task, span in zip(tasks, spans, strict=True):
        assert span.end - span.start == task.seconds
        assert all(spans[i].end <= span.start for i in task.after)
        assert span.after == task.after
    for stream in STREAMS:
        mine = [s for s in spans if s.stream == stream]
        assert all(a.end <= b.start for a, b in pairwise(mine))
    assert sum(spans[i].end - spans[i].start for i in forecast.critical_path) == forecast.seconds
    assert forecast.memory["device"][-1][1] == 0
    assert all(level >= 0 for _, level in forecast.memory["device"])
    assert forecast.peaks["device"].bytes == max(_held(forecast, tasks, s.start) for s in spans)


def _held(forecast: Forecast, tasks: list[Task], now: float) -> int:
    """Bytes of the tasks that run at ``now``."""
    return sum(t.takes[0][1] for t, s in zip(tasks, forecast.spans, strict=True) if s.start <= now < s.end)
