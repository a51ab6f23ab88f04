"""Saved activations on NVMe and on a host that counts as another memory: what comes back is what left, bit by bit."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zerograph._core import FaultEffect, FaultPoint
from zerograph.core.errors import StorageError
from zerograph.core.machine import Tier
from zerograph.runtime.host import Pairs, SplitHost, Transfer
from zerograph.runtime.nvme import Arena
from zerograph.runtime.saved import SavedActivations

ROOM = 2**20
TIERS: tuple[Tier, ...] = ("nvme", "host")


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[SavedActivations]:
    with Arena([tmp_path], 2 * ROOM) as arena:
        host = SplitHost()
        found = SavedActivations(lambda: host)
        found.arenas, found.room = [arena], ROOM
        yield found
        found.abandon()


def odd() -> list[Tensor]:
    """Views of one memory, other strides, dtypes and gaps, a broadcast row, a scalar and nothing at all."""
    whole = torch.randn(40, 90)
    masks = torch.rand(7, 33) > 0.5
    return [
        whole.t(), whole[3:9, 10:20], whole.view(torch.int32)[:, 1::3], masks, torch.randn(5, 1).expand(5, 4),
        torch.randn(30, 20, dtype=torch.bfloat16)[::2], torch.randn(8, 9, dtype=torch.complex64).conj(),
        torch.randn(8, 9, dtype=torch.complex64).conj().imag, torch.tensor(3.5), torch.empty(0, 7),
        torch.arange(10_000),
    ]  # fmt: skip


@pytest.mark.parametrize("tier", TIERS)
def test_what_comes_back_is_what_left_with_its_strides(saved: SavedActivations, tier: Tier) -> None:
    tensors = odd()
    wanted = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    layouts = [(t.shape, t.stride(), t.dtype) for t in tensors]
    away = saved.spill(tensors, tier)
    saved.wait()
    for _ in range(2):  # as of a graph that is retained
        back = saved.finish(saved.fetch(away, tier))
        assert (
            [(t.shape, t.stride(), t.dtype) for t in back] == layouts == [(t.shape, t.stride(), t.dtype) for t in away]
        )
        assert all(torch.equal(a, b) for a, b in zip(back, wanted, strict=True))
        # One memory moves once: views look at one again.
        assert len({t.untyped_storage().data_ptr() for t in away[:3]}) == 1
        assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(away, wanted, strict=True))  # whoever reads them: a hook, for one


def test_memory_of_other_shapes_on_the_host_goes(saved: SavedActivations) -> None:
    for count in range(1000, 1050):
        away = saved.spill([torch.ones(count)], "host")
        saved.wait()
        del away
    assert saved.on_host == 4 * 1049


def test_extents_of_other_shapes_go_where_there_is_no_room(saved: SavedActivations) -> None:
    saved.room = 2**30  # more than the arena has
    for size in (ROOM // 2, 3 * ROOM // 2, ROOM):
        away = saved.spill([torch.ones(size, dtype=torch.uint8)], "nvme")
        saved.wait()
        assert saved.arenas[0].maps(away[0])
        del away


def test_an_extent_is_used_again_when_everybody_has_let_go(saved: SavedActivations) -> None:
    for step in range(5):
        tensors = [torch.full((1000,), float(step)), torch.full((3000,), float(step))]
        away = saved.spill(tensors, "nvme")
        saved.wait()
        first = away.pop(0)
        del away
        again = saved.spill([torch.full((3000,), -1.0)], "nvme")
        saved.wait()
        assert torch.equal(saved.finish(saved.fetch([first], "nvme"))[0], tensors[0])
        saved.wait()
        del first, again
    assert saved.bytes == 4096 + 12288


def test_what_finds_no_room_stays_in_memory_and_is_told_once(
    saved: SavedActivations, caplog: pytest.LogCaptureFixture
) -> None:
    """As of two forwards before one backward: no error, and nothing waits for room."""
    tensors = [torch.randn(ROOM // 8) for _ in range(3)]  # two fit
    away: list[Tensor] = []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            away += saved.spill(tensors, "nvme")
            saved.wait()
    assert [t.data_ptr() == tensors[k % 3].data_ptr() for k, t in enumerate(away)] == [False] * 2 + [True] * 4
    back = saved.finish(saved.fetch(away, "nvme"))
    assert all(torch.equal(t, tensors[k % 3]) for k, t in enumerate(back))
    (record,) = caplog.records
    assert "activations stay in memory where they do not find the 1 MiB on NVMe" in record.getMessage()


def test_other_sizes_take_the_room_of_those_that_are_gone(saved: SavedActivations) -> None:
    for rows in (100, 900, 250, 640):
        away = saved.spill([torch.ones(rows, 256)], "nvme")
        saved.wait()
        assert saved.arenas[0].maps(away[0]) and saved.bytes <= ROOM
        assert torch.equal(saved.finish(saved.fetch(away, "nvme"))[0], torch.ones(rows, 256))
        del away


@pytest.mark.parametrize("tier", TIERS)
def test_what_a_hook_has_brought_back_is_taken_as_it_is(saved: SavedActivations, tier: Tier) -> None:
    away = saved.spill([torch.arange(5000.0)], tier)
    saved.wait()
    copies = [tensor.clone() for tensor in away]
    del away
    assert torch.equal(saved.finish(saved.fetch(copies, tier))[0], torch.arange(5000.0))


def test_memory_is_free_when_its_copy_is_done_though_nobody_waits(saved: SavedActivations) -> None:
    freed = threading.Event()

    class Told:
        def __del__(self) -> None:
            freed.set()

    tensor = torch.ones(20_000)
    flat = tensor.numpy()
    owner = torch.frombuffer(_Buffer(flat, Told()), dtype=torch.float32)
    away = saved.spill([owner], "nvme")
    del owner
    gc.collect()
    more = []
    while not freed.wait(0.05):  # goes with one of the next transfers
        assert len(more) < 200
        more += saved.spill([torch.ones(1024)], "nvme")
    saved.wait()
    assert torch.equal(away[0], tensor)


class _Buffer(bytearray):
    """Memory that tells when it goes."""

    def __init__(self, values: object, told: object) -> None:
        super().__init__(memoryview(values).cast("B"))  # type: ignore[arg-type]
        self.told = told


def test_whoever_does_not_wait_for_the_host_reads_not_a_number(
    saved: SavedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = threading.Event()
    away = saved.spill([torch.ones(100)], "host")
    saved.wait()
    host = saved._host()
    assert host is not None
    started = host.start

    def late(pairs: Pairs) -> Transfer:
        host._threads[next(iter(host._threads))].submit(goes.wait)
        return started(pairs)

    monkeypatch.setattr(host, "start", late)
    returning = saved.fetch(away, "host")
    assert returning.here[0].isnan().all()
    goes.set()
    assert torch.equal(saved.finish(returning)[0], torch.ones(100))


def test_a_disk_that_fails_is_an_error_and_what_comes_next_works(saved: SavedActivations) -> None:
    saved.arenas[0]._engine.inject([(FaultPoint.write, 1, 1, FaultEffect.error, 28)])
    saved.spill([torch.ones(5000)], "nvme")
    with pytest.raises(StorageError, match="cannot write"):
        saved.wait()
    saved.abandon()
    away = saved.spill([torch.ones(5000)], "nvme")
    saved.wait()
    saved.arenas[0]._engine.inject([(FaultPoint.read, 1, 1, FaultEffect.error, 5)])
    with pytest.raises(StorageError, match="cannot read"):
        saved.finish(saved.fetch(away, "nvme"))
    assert torch.equal(saved.finish(saved.fetch(away, "nvme"))[0], torch.ones(5000))
