"""Timings are kept while somebody records, and of what belongs to a step."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.timings import Purpose, Timing, Timings

STATES = Purpose("states", "layers.0.weight")


def test_only_a_recording_keeps_them() -> None:
    timings = Timings()
    timings.add("nvme_read", STATES, 1, 2)
    assert timings.take() == []
    timings.begin()
    timings.add("nvme_write", STATES, 5, 7)
    timings.add("cpu_update", STATES, 3, 4)
    timings.add("nvme_read", None, 1, 2)  # no part of a step
    timings.add("nvme_read", STATES, 0, 0)  # of no bytes
    assert timings.take() == [Timing("cpu_update", STATES, 3, 4), Timing("nvme_write", STATES, 5, 7)]
    timings.add("nvme_read", STATES, 8, 9)
    assert timings.take() == []


def test_a_recording_knows_of_which_updates_it_has_all() -> None:
    timings = Timings()
    before = timings.update()
    timings.begin()
    own, unended = timings.update(), timings.update()
    for at, update in enumerate((before, own, unended), 1):
        timings.add("cpu_update", Purpose("states", "layers.0.weight", update), at, at + 1)
    before.ended = own.ended = True
    timings.add("nvme_read", Purpose("shard", "layers.0.weight"), 9, 10)
    assert [timing.complete for timing in timings.take()] == [False, True, False, True]
    between = timings.update()
    timings.begin()
    timings.add("cpu_update", Purpose("states", "layers.0.weight", between), 1, 2)
    unended.ended = between.ended = True
    timings.add("cpu_update", Purpose("states", "layers.0.weight", unended), 3, 4)
    assert [timing.complete for timing in timings.take()] == [False, False]


def test_an_arena_tells_when_bytes_moved(tmp_path: Path) -> None:
    timings = Timings()
    with Arena([tmp_path], 2**24, timings=timings) as arena:
        extent, data = arena.allocate(2**23), torch.arange(2**21, dtype=torch.float32)
        timings.begin()
        begin = time.time_ns()
        written = arena.write(extent, data, purpose=STATES)
        while not arena.done(written):
            time.sleep(0.001)
        end = time.time_ns()
        time.sleep(0.05)  # whoever waits later changes nothing
        arena.wait(written)
        arena.wait(arena.read(extent, torch.empty_like(data), purpose=STATES))
        arena.wait(arena.read(extent, torch.empty_like(data)))  # for nobody's step
        write, read = timings.take()
    assert (write.stream, read.stream) == ("nvme_write", "nvme_read")
    assert begin <= write.begin < write.end <= end < read.begin < read.end <= time.time_ns()
