"""Timings of a step, as spans and as seconds of its instructions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_file

from zerograph.compiler.under_way import UnderWay, length, seconds_of, under_way
from zerograph.core.files.runfile import move_key
from zerograph.core.instructions import Move
from zerograph.core.program import Program
from zerograph.core.timeline import union
from zerograph.runtime.timings import Purpose, Timing

PLAN = plan_file(2).plan
FIRST = PLAN.buckets[0]
OWN = FIRST.params[0].name
BACKWARD = 100


def moves_of(*timings: tuple[str, str, int, int], whose: str = OWN) -> list[UnderWay]:
    return under_way((Timing(s, Purpose(what, whose), a, b) for s, what, a, b in timings), PLAN, BACKWARD)  # type: ignore[arg-type]


def program(kind: str, *moves: Move) -> Program:
    return Program(kind, 0, 1, moves, (), (), (), tuple(b.name for b in PLAN.buckets))


def read_shard(tile: int = 0) -> Move:
    return Move("nvme", "host", "shard", FIRST.name, FIRST.name, 8, (), (), (), FIRST.index, tile, offload_tier="nvme")


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda t: (t[0], t[0] + t[1]))))
def test_a_union_covers_the_same_time_once(times: list[tuple[int, int]]) -> None:
    found = list(union(times))
    assert {t for a, b in found for t in range(a, b)} == {t for a, b in times for t in range(a, b)}
    assert all(a[1] < b[0] for a, b in pairwise(found))
    assert length(found) == pytest.approx(sum(b - a for a, b in found) / 1e9)


def test_transfers_side_by_side_are_one_span() -> None:
    (move,) = moves_of(
        ("nvme_read", "states", 110, 150), ("nvme_read", "states", 120, 160), ("nvme_read", "states", 170, 180)
    )
    assert (move.phase, move.bucket, move.label, move.operation) == ("update", FIRST.index, FIRST.name, "read")
    assert move.times == ((110, 160), (170, 180))
    assert [(times, span.name, span.stream) for times, span in move.spans()] == [
        ((110, 160), f"read states of {FIRST.name}", "nvme_read"),
        ((170, 180), f"read states of {FIRST.name}", "nvme_read"),
    ]


def test_an_update_is_named_as_forecasts_name_it() -> None:
    (move,) = moves_of(("cpu_update", "states", 110, 150))
    ((_, span),) = move.spans()
    assert (span.name, span.operation, span.what) == (f"update {FIRST.name}", "update", "states")
    assert move.key == move_key("update", "states", FIRST.index, "")


def test_a_wait_is_shown_and_not_counted() -> None:
    (wait,) = moves_of(("gather", "wait", 10, 20))
    ((_, span),) = wait.spans()
    assert (span.name, span.stream, span.phase) == (f"wait for the update of {FIRST.name}", "gather", "forward")
    assert seconds_of([wait], ()) == {}


def test_activations_have_their_own_name() -> None:
    write, read = moves_of(
        ("nvme_write", "activations", 10, 20), ("nvme_read", "activations", 110, 120), whose="layers.1"
    )
    assert (write.phase, read.phase) == ("forward", "backward")
    assert write.bucket == -1 and write.key == "write activations layers.1"


def test_seconds_are_those_of_one_instruction() -> None:
    moves = moves_of(("nvme_read", "shard", 10, 40), ("nvme_read", "shard", 110, 130))
    programs = program("forward", read_shard()), program("backward", read_shard())
    assert seconds_of(moves, programs) == {f"read shard {FIRST.index}": pytest.approx(25e-9)}
    tiles = program("forward", read_shard(0), read_shard(1)), program("backward", read_shard(0), read_shard(1))
    assert seconds_of(moves, tiles) == {f"read shard {FIRST.index}": pytest.approx(12.5e-9)}


def test_what_only_one_program_moved_is_no_mean_of_two() -> None:
    moves = moves_of(("nvme_read", "shard", 10, 40))  # it stayed whole for the backward
    programs = program("forward", read_shard()), program("backward", read_shard())
    assert seconds_of(moves, programs) == {f"read shard {FIRST.index}": pytest.approx(30e-9)}


def test_a_part_of_an_update_is_shown_and_not_counted() -> None:
    purpose = Purpose("states", OWN)
    timings = [Timing("cpu_update", purpose, 10, 20, complete=False), Timing("cpu_update", purpose, 110, 150)]
    moves = under_way(timings, PLAN, BACKWARD)
    assert sorted(times for move in moves for times in move.times) == [(10, 20), (110, 150)]
    assert seconds_of(moves, ()) == {f"update states {FIRST.index}": pytest.approx(40e-9)}
    assert seconds_of(under_way(timings[:1], PLAN, BACKWARD), ()) == {}
