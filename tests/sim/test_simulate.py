"""The simulation keeps streams in order, waits for what it must, and counts memory at every moment.

Tests ``sim/costs.py``, ``sim/tasks.py`` and ``sim/cells.py``.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from plans import Task, play

from zerograph.core.files.planfile import Holding
from zerograph.core.machine import Tier
from zerograph.core.timeline import STREAMS


def held(size: int, first: int, last: int, tier: Tier = "device") -> Holding:
    return Holding("memory", "temporary", tier, size, first, last)


def test_a_gather_travels_beside_compute_and_exposes_what_is_left() -> None:
    tasks = [
        Task("gather a", "gather", 2.0),
        Task("a", "compute", 3.0, after=(0,)),
        Task("gather b", "gather", 4.0),
        Task("b", "compute", 1.0, after=(2,)),
    ]
    forecast = play(tasks, [held(100, -1, -1), held(10, 0, 1), held(30, 2, 3)])
    assert [(s.start, s.end) for s in forecast.spans] == [(0, 2), (2, 5), (2, 6), (6, 7)]
    assert forecast.seconds == 7
    assert forecast.exposed_communication == 3
    assert forecast.busy() == {"gather": 6, "compute": 4}
    assert forecast.critical_path == (0, 2, 3)
    assert forecast.memory["device"] == ((0, 110), (2, 140), (5, 130), (7, 100))
    assert (forecast.peaks["device"].bytes, forecast.peaks["device"].name) == (140, "gather b")


def test_memory_that_one_task_takes_and_gives_counts_even_without_length() -> None:
    forecast = play([Task("a", "compute", 0.0)], [held(5, 0, 0, "host")])
    assert forecast.peaks["host"].bytes == 5
    assert forecast.memory["host"][-1][1] == 0


def test_what_is_given_back_at_a_moment_is_there_for_the_next() -> None:
    tasks = [Task(n, "compute", 1.0) for n in "abc"]
    assert play(tasks, [held(8, i, i) for i in range(3)]).peaks["device"].bytes == 8


def test_nothing_to_do() -> None:
    forecast = play([], [held(3, -1, -1)])
    assert forecast.seconds == 0
    assert forecast.peaks["device"].bytes == 3


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Task], list[Holding]]:
    tasks: list[Task] = []
    holdings: list[Holding] = []
    for index in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        size = draw(st.integers(0, 50))
        tasks.append(Task(f"t{index}", draw(st.sampled_from(STREAMS)), draw(st.integers(1, 5)), tuple(after)))
        holdings.append(held(size, index, index))
    return tasks, holdings


@given(programs())
def test_any_program(program: tuple[list[Task], list[Holding]]) -> None:
    tasks, holdings = program
    forecast = play(tasks, holdings)
    spans = forecast.spans
    for task, span in zip(tasks, spans, strict=True):
        assert span.end - span.start == task.seconds
        assert all(spans[i].end <= span.start for i in span.after)
        assert span.after == task.span.after
    for stream in STREAMS:
        mine = [s for s in spans if s.stream == stream]
        assert all(a.end <= b.start for a, b in pairwise(mine))
    assert sum(spans[i].end - spans[i].start for i in forecast.critical_path) == forecast.seconds
    assert forecast.memory["device"][-1][1] == 0
    assert all(level >= 0 for _, level in forecast.memory["device"])
    assert forecast.peaks["device"].bytes == max(
        sum(h.bytes for h in holdings if h.held_at(s.start, spans)) for s in spans
    )
