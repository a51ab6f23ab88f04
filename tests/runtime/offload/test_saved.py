"""Saved activations on NVMe, on a host that counts as another memory, and behind it: what comes back is what left, bit
by bit."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zerograph._core import FaultEffect, FaultPoint
from zerograph.core.errors import StorageError
from zerograph.core.machine import Tier
from zerograph.core.slots import LEAVING, SLOTS
from zerograph.runtime.offload.host import Transfer
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.saved import SavedActivations
from zerograph.runtime.testing.simulated_host import SimulatedHost

ROOM = 2**20
WAYS: tuple[tuple[Tier, ...], ...] = (("nvme",), ("host",), ("host", "nvme"))
ways = pytest.mark.parametrize("way", WAYS, ids=" and ".join)


def made(folder: Path, host: SimulatedHost | None) -> Iterator[SavedActivations]:
    with Arena([folder], 2 * ROOM) as arena:
        found = SavedActivations(lambda: host)
        found.arenas, found.room = [arena], ROOM
        yield found
        found.abandon()


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[SavedActivations]:
    """Those of a device whose host has no other memory."""
    yield from made(tmp_path, None)


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[SavedActivations]:
    """Those of a device with a host, and NVMe behind that."""
    yield from made(tmp_path, SimulatedHost())


def gone(saved: SavedActivations, tensors: Sequence[Tensor], way: tuple[Tier, ...]) -> list[Tensor]:
    """What stands for ``tensors`` when they have left, by the tiers of ``way``."""
    offloaded = [*tensors]
    for tier in way:
        offloaded = saved.spill(offloaded, tier)
    saved.wait()
    return offloaded


def back_from(saved: SavedActivations, offloaded: Sequence[Tensor], way: tuple[Tier, ...]) -> list[Tensor]:
    returning = saved.fetch(offloaded, way[-1])
    return saved.finish(saved.copy_up(returning) if len(way) > 1 else returning)


@pytest.fixture
def of_way(way: tuple[Tier, ...], tmp_path: Path) -> Iterator[SavedActivations]:
    yield from made(tmp_path, SimulatedHost() if "host" in way else None)


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


@ways
def test_what_comes_back_is_what_left_with_its_strides(of_way: SavedActivations, way: tuple[Tier, ...]) -> None:
    tensors, saved = odd(), of_way
    wanted = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    layouts = [(t.shape, t.stride(), t.dtype) for t in tensors]
    offloaded = gone(saved, tensors, way)
    for _ in range(2):  # as of a graph that is retained
        back = back_from(saved, offloaded, way)
        assert (
            [(t.shape, t.stride(), t.dtype) for t in back]
            == layouts
            == [(t.shape, t.stride(), t.dtype) for t in offloaded]
        )
        assert all(torch.equal(a, b) for a, b in zip(back, wanted, strict=True))
        # One memory moves once: views look at one again.
        assert len({t.untyped_storage().data_ptr() for t in offloaded[:3]}) == 1
        assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(offloaded, wanted, strict=True))  # whoever reads them: a hook, for one


def test_memory_of_other_shapes_on_the_host_goes(behind: SavedActivations) -> None:
    for count in range(1000, 1050):
        offloaded = behind.spill([torch.ones(count)], "host")
        behind.wait()
        del offloaded
    assert behind.on_host == 4 * 1049


def test_few_layers_are_under_way_and_wait_on_the_host(behind: SavedActivations) -> None:
    """Of a device that is faster than the copies, and copies that are faster than the disk."""
    here = [torch.full((1000,), float(layer)) for layer in range(20)]
    offloaded = []
    for tensor in here:
        offloaded += behind.spill(behind.spill([tensor], "host"), "nvme")
        assert len(behind._copies) <= LEAVING and len(behind._writes) <= SLOTS
    assert behind.on_host <= 4000 * (LEAVING + SLOTS)
    behind.wait()
    assert all(torch.equal(a, b) for a, b in zip(back_from(behind, offloaded, ("host", "nvme")), here, strict=True))


def test_what_finds_no_room_behind_the_host_stays_there(
    behind: SavedActivations, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = [torch.randn(ROOM // 8) for _ in range(3)]  # two fit
    with caplog.at_level(logging.WARNING):
        offloaded = gone(behind, tensors, ("host", "nvme"))
    assert [behind.arenas[0].maps(t) for t in offloaded] == [True, True, False]
    assert offloaded[2].data_ptr() != tensors[2].data_ptr()
    back = back_from(behind, offloaded, ("host", "nvme"))
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    assert back[2].data_ptr() not in (offloaded[2].data_ptr(), tensors[2].data_ptr())
    assert len(caplog.records) == 1


def test_extents_of_other_shapes_go_where_there_is_no_room(saved: SavedActivations) -> None:
    saved.room = 2**30  # more than the arena has
    for size in (ROOM // 2, 3 * ROOM // 2, ROOM):
        offloaded = saved.spill([torch.ones(size, dtype=torch.uint8)], "nvme")
        saved.wait()
        assert saved.arenas[0].maps(offloaded[0])
        del offloaded


def test_an_extent_is_used_again_when_everybody_has_let_go(saved: SavedActivations) -> None:
    for step in range(5):
        tensors = [torch.full((1000,), float(step)), torch.full((3000,), float(step))]
        offloaded = saved.spill(tensors, "nvme")
        saved.wait()
        first = offloaded.pop(0)
        del offloaded
        again = saved.spill([torch.full((3000,), -1.0)], "nvme")
        saved.wait()
        assert torch.equal(saved.finish(saved.fetch([first], "nvme"))[0], tensors[0])
        saved.wait()
        del first, again
    assert saved.bytes == 4096 + 12288


def test_what_finds_no_room_stays_in_memory_and_is_reported_once(
    saved: SavedActivations, caplog: pytest.LogCaptureFixture
) -> None:
    """As of two forwards before one backward: no error, and nothing waits for room."""
    tensors = [torch.randn(ROOM // 8) for _ in range(3)]  # two fit
    offloaded: list[Tensor] = []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            offloaded += saved.spill(tensors, "nvme")
            saved.wait()
    assert [t.data_ptr() == tensors[k % 3].data_ptr() for k, t in enumerate(offloaded)] == [False] * 2 + [True] * 4
    back = saved.finish(saved.fetch(offloaded, "nvme"))
    assert all(torch.equal(t, tensors[k % 3]) for k, t in enumerate(back))
    (record,) = caplog.records
    assert "activations stay in memory where they do not find the 1 MiB on NVMe" in record.getMessage()


def test_other_sizes_take_the_room_of_those_that_are_gone(saved: SavedActivations) -> None:
    for rows in (100, 900, 250, 640):
        offloaded = saved.spill([torch.ones(rows, 256)], "nvme")
        saved.wait()
        assert saved.arenas[0].maps(offloaded[0]) and saved.bytes <= ROOM
        assert torch.equal(saved.finish(saved.fetch(offloaded, "nvme"))[0], torch.ones(rows, 256))
        del offloaded


@ways
def test_what_a_hook_has_brought_back_is_taken_as_it_is(of_way: SavedActivations, way: tuple[Tier, ...]) -> None:
    offloaded = gone(of_way, [torch.arange(5000.0)], way)
    copies = [tensor.clone() for tensor in offloaded]
    del offloaded
    assert torch.equal(back_from(of_way, copies, way)[0], torch.arange(5000.0))


def test_memory_is_free_when_its_copy_is_done_though_nobody_waits(saved: SavedActivations) -> None:
    freed = threading.Event()

    class Owner:
        def __del__(self) -> None:
            freed.set()

    tensor = torch.ones(20_000)
    flat = tensor.numpy()
    owner = torch.frombuffer(_Buffer(flat, Owner()), dtype=torch.float32)
    offloaded = saved.spill([owner], "nvme")
    del owner
    gc.collect()
    more = []
    while not freed.wait(0.05):  # goes with one of the next transfers
        assert len(more) < 200
        more += saved.spill([torch.ones(1024)], "nvme")
    saved.wait()
    assert torch.equal(offloaded[0], tensor)


class _Buffer(bytearray):
    """Memory that tells when it goes."""

    def __init__(self, values: object, holder: object) -> None:
        super().__init__(memoryview(values).cast("B"))  # type: ignore[arg-type]
        self.holder = holder


def test_whoever_does_not_wait_for_the_host_reads_not_a_number(
    behind: SavedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = threading.Event()
    offloaded = behind.spill([torch.ones(100)], "host")
    behind.wait()
    host = behind._host()
    assert isinstance(host, SimulatedHost)
    started = host.start

    def late(*args: Any, **options: Any) -> Transfer:
        host.after_copies(lambda: goes.wait() and None)
        return started(*args, **options)

    monkeypatch.setattr(host, "start", late)
    returning = behind.fetch(offloaded, "host")
    assert returning.here[0].isnan().all()
    goes.set()
    assert torch.equal(behind.finish(returning)[0], torch.ones(100))


@pytest.mark.parametrize("way", [("nvme",), ("host", "nvme")], ids=" and ".join)
def test_a_disk_that_fails_is_an_error_and_what_comes_next_works(
    of_way: SavedActivations, way: tuple[Tier, ...]
) -> None:
    engine = of_way.arenas[0]._engine
    engine.inject([(FaultPoint.write, 1, 1, FaultEffect.error, 28)])
    with pytest.raises(StorageError, match="cannot write"):
        gone(of_way, [torch.ones(5000)], way)
    of_way.abandon()
    offloaded = gone(of_way, [torch.ones(5000)], way)
    engine.inject([(FaultPoint.read, 1, 1, FaultEffect.error, 5)])
    with pytest.raises(StorageError, match="cannot read"):
        back_from(of_way, offloaded, way)
    of_way.abandon()
    assert torch.equal(back_from(of_way, offloaded, way)[0], torch.ones(5000))
