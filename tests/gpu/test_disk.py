"""Training with what a device has no room for on NVMe, behind the host of an accelerator."""

from __future__ import annotations

import errno
import functools
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.accelerator import on_it
from numerics import host_cases as cases
from numerics.test_offload import Run, _accumulates_and_evaluates, adamw, momentum, stock
from ranks import run, warned
from torch import nn

import zerograph
from zerograph._core import FaultEffect, FaultPoint
from zerograph.core.errors import StorageError, UnsupportedError
from zerograph.core.slots import SLOTS


def _each_placement(folder: Path, dtype: torch.dtype | None) -> dict[str, int]:
    for make, moved in (
        (adamw, ("optimizer", "gradients", "parameters")),
        (momentum, ("parameters",)),
        (stock, ("parameters",)),
    ):
        host = Run(make, stage=3, dtype=dtype, **cases.on_host())
        _accumulates_and_evaluates(host)
        for offload in moved:
            disk = Run(make, stage=3, dtype=dtype, **cases.on_disk(folder, offload))
            _accumulates_and_evaluates(disk)
            cases._same(host.result(), disk.result())
            assert all(p.is_cpu for p in disk.model.layers.parameters())
    return disk.backend.report().on_nvme


@pytest.mark.parametrize(("world_size", "dtype"), [(1, None), (2, torch.bfloat16)], ids=["1", "2-bfloat16"])
def test_a_disk_gives_the_same_bits_as_the_host(world_size: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    for held in run(world_size, on_it, _each_placement, tmp_path, dtype):
        assert {"parameters", "gradients", "optimizer states"} <= {what for what, size in held.items() if size}


CASES = [cases.unusual, cases.alike_everywhere, cases.reads_gradients]


def _case(case: Callable[[dict[str, Any]], None], folder: Path) -> None:
    case(cases.on_disk(folder))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_training_is_the_same(case: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    run(2, on_it, _case, case, tmp_path)


def _resumed(folder: Path) -> None:
    cases.resumed(str(folder / "checkpoint"), cases.on_disk(folder))


def test_checkpoints_load(tmp_path: Path) -> None:
    run(2, on_it, _resumed, tmp_path)


def _overlapping(folder: Path, options: dict[str, Any], dtype: torch.dtype | None) -> None:
    make = lambda model, **more: zerograph.optim.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=False, **more)  # noqa: E731
    plain = Run(make, stage=3, dtype=dtype, **cases.on_disk(folder))
    beside = Run(functools.partial(make, **options), stage=3, dtype=dtype, **cases.on_disk(folder))
    for training in (plain, beside):
        training.steps(4)
    cases._same(plain.result(), beside.result())


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"overlap": True}, torch.bfloat16), ({"overlap": True}, None), ({"overlap": "forward"}, torch.bfloat16)],
    ids=["backward", "backward, of what was fetched", "forward"],
)
def test_updates_beside_the_device_are_the_same(
    options: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    run(2, on_it, _overlapping, tmp_path, options, dtype)


def _activations(folder: Path, recompute: str) -> int:
    host, disk = (
        Run(adamw, stage=3, recompute=recompute, **more)
        for more in ({"activations": "host"}, {"activations": "nvme", "path": str(folder)})
    )
    for training in (host, disk):
        _accumulates_and_evaluates(training)
    cases._same(host.result(), disk.result())
    return disk.backend.report().on_nvme["activations"]


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_what_layers_save_waits_there(recompute: str, tmp_path: Path) -> None:
    assert all(run(2, on_it, _activations, tmp_path, recompute))


def _built_on_meta(folder: Path) -> None:
    cases.built_on_meta(cases.on_disk(folder), is_pinned=False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_on_the_meta_device_is_made_there(world_size: int, tmp_path: Path) -> None:
    run(world_size, on_it, _built_on_meta, tmp_path)


def _too_large(folder: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(640, 64)
    backend = zerograph.backend(stage=3, compute="eager", offload="auto", memory="20KiB", path=str(folder))
    with pytest.raises(UnsupportedError, match="more memory than the device may use"):
        zerograph.materialize(zerograph.shard(model, backend, device=Run.device))


def test_a_search_places_no_model_on_the_meta_device(tmp_path: Path) -> None:
    run(1, on_it, _too_large, tmp_path)


def _searched(folder: Path) -> tuple[int, int]:
    plain = Run(adamw, stage=3)
    found = Run(adamw, stage=3, offload="auto", memory="350KiB", host_memory="150KiB", path=str(folder))
    for training in (plain, found):
        _accumulates_and_evaluates(training)
    cases.close(torch.tensor(found.losses), torch.tensor(plain.losses))
    report = found.backend.report()
    return sum(report.on_host.values()), sum(report.on_nvme.values())


def test_a_search_uses_all_tiers(tmp_path: Path) -> None:
    """Neither the device nor the host has room for all of it."""
    ((on_host, on_nvme),) = run(1, on_it, _searched, tmp_path)
    assert 0 < on_host <= 150 * 2**10
    assert on_nvme


def _staged(folder: Path) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16))).to(Run.device)
    backend = zerograph.backend(stage=3, compute="eager", bucket_size="300KiB", prefetch=1, **cases.on_disk(folder))
    compiled, optimizer = torch.compile(model, backend=backend), adamw(model)
    for _ in range(3):
        compiled(torch.ones(4, 256, device=Run.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(backend._store.locations.hosted.memory._staged) - len(backend._store.slots.ring)


def test_the_host_holds_a_few_layers_on_their_way(tmp_path: Path) -> None:
    """Of 16 layers, however far it is ahead of the device: a ring and one more, up, and as many gradients down."""
    (staged,) = run(1, on_it, _staged, tmp_path)
    assert 0 < staged <= 2 * (SLOTS + 1)


def _locked_pages(folder: Path) -> tuple[int, int]:
    """How often pages were locked in warm steps, and before."""
    training = Run(adamw, stage=3, activations="nvme", **cases.on_disk(folder))
    training.steps(3)
    memory = training.backend._store.locations.hosted.memory
    before = len(memory._staged)
    training.steps(6)
    return len(memory._staged) - before, before


def test_warm_steps_lock_no_pages(tmp_path: Path) -> None:
    ((made, held),) = run(1, on_it, _locked_pages, tmp_path)
    # One or the other, where the host is farther ahead than before.
    assert held and made < 6


def _not_locked(folder: Path) -> list[str]:
    refuses = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=None)
    with pytest.MonkeyPatch.context() as patch, warned() as messages:
        patch.setattr(torch.get_device_module(Run.device), "cudart", lambda: refuses)
        disk = Run(adamw, stage=3, **cases.on_disk(folder))
        disk.steps(2)
    other = Run(adamw, stage=3, **cases.on_host())
    other.steps(2)
    cases._same(disk.result(), other.result())
    return messages


def test_memory_that_cannot_be_locked_is_used_as_it_is(tmp_path: Path) -> None:
    ((message,),) = run(1, on_it, _not_locked, tmp_path)
    assert "cannot be page-locked (error 2 of cudaHostRegister)" in message


def _threads(folder: Path) -> list[str]:
    training = Run(adamw, stage=3, activations="nvme", **cases.on_disk(folder))
    training.steps(2)
    del training
    torch._dynamo.reset()
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := [t.name for t in threading.enumerate() if "zerograph" in t.name]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_no_thread_outlives_its_backend(tmp_path: Path) -> None:
    assert run(1, on_it, _threads, tmp_path, fresh=True) == [[]]


def _fails(folder: Path) -> None:
    training = Run(adamw, stage=3, dtype=torch.bfloat16, **cases.on_disk(folder))
    training.steps(2)
    arena = training.backend._store.room.arena
    before = training.result()
    arena._engine.inject([(FaultPoint.read, 1, 1, FaultEffect.error, errno.EIO)])
    with pytest.raises(StorageError):
        training.backward()
    torch.accelerator.synchronize()
    cases._same(before, training.result())
    training.optimizer.zero_grad()
    training.steps(2)
    assert all(torch.isfinite(torch.tensor(training.losses)))


def test_a_read_that_fails_is_raised_and_training_goes_on(tmp_path: Path) -> None:
    run(1, on_it, _fails, tmp_path)
