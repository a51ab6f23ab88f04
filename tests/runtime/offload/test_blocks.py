"""Where shards lie in a block, and in which transfers some of them come."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerograph.runtime.offload.blocks import UNIT, Block, ShardRun


def block(*counts: int) -> Block:
    return Block.of("b", torch.float32, {f"p{i}": count for i, count in enumerate(counts)})


def test_neighbours_are_one_run_and_the_last_one_has_the_padding() -> None:
    found = block(100, 0, 30, 5000)
    assert found.begins == {"p0": 0, "p1": 128, "p2": 128, "p3": 192} and found.ends["p3"] == 5192
    assert found.elements == 3 * UNIT
    assert list(found.runs(["p0", "p1"])) == [ShardRun(0, 128, ("p0", "p1"))]
    assert list(found.runs(["p3", "p0"])) == [ShardRun(0, 128, ("p0",)), ShardRun(192, 3 * UNIT, ("p3",))]


def test_reads_skip_only_what_is_worth_a_transfer_of_its_own() -> None:
    found = block(100, 30, 10**6, 50)
    assert found.reads(["p0", "p3"]) == [
        ShardRun(0, UNIT, ("p0",)),
        ShardRun(1_000_192 // UNIT * UNIT, found.elements, ("p3",)),
    ]
    assert [run.names for run in found.reads(["p0", "p2"])] == [("p0", "p2")]


@given(st.lists(st.integers(0, 3 * UNIT), min_size=1, max_size=8), st.data())
def test_runs_cover_what_was_asked_for_and_nothing_of_others(counts: list[int], data: st.DataObject) -> None:
    found = block(*counts)
    names = data.draw(st.lists(st.sampled_from(sorted(found.begins)), unique=True, min_size=1))
    runs = list(found.runs(names))
    assert sorted(name for run in runs for name in run.names) == sorted(names)
    others = found.begins.keys() - set(names)
    for run in runs:
        assert all(run.begin <= found.begins[name] <= found.ends[name] <= run.end for name in run.names)
        assert not any(found.begins[o] < run.end and run.begin < found.ends[o] for o in others)
    for read in found.reads(names):
        assert read.begin % UNIT == read.end % UNIT == 0 and read.end <= found.elements
