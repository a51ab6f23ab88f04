"""Offload to the disk of each host, all at one path; namespaces of mounts keep a host from the others' disks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from host_ranks import Net, assert_left_nothing, assert_mean, own_disk, run_on, taken, train, two_of_each

import zerograph

ROWS, STEPS = 16, 4


class Trained(NamedTuple):
    in_memory: list[float]
    on_disk: list[float]
    opened: int  # bytes of the files that this rank has open on the disk of its host
    taken: int  # bytes of all files there


def _opened() -> Iterator[os.stat_result]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed
            yield os.fstat(int(number))


def _losses(**offload: Any) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    model.compile(backend=zerograph.backend(stage=3, compute="eager", **offload))
    return train(model, zerograph.optim.AdamW(model.parameters(), lr=1e-3), ROWS, range(STEPS))


def _offloaded(folder: Path) -> Trained:
    disk = own_disk(folder)
    in_memory = _losses()
    on_disk = _losses(offload="parameters", tier="nvme", path=str(disk))
    dist.barrier()
    opened = sum(512 * file.st_blocks for file in _opened() if file.st_dev == disk.stat().st_dev)
    found = Trained(in_memory, on_disk, opened, taken(disk, Path("/dev/shm")))
    dist.barrier()  # nobody leaves before all have looked
    return found


def test_each_host_offloads_to_its_own_disk(hosts: list[Any], disks: Path) -> None:
    found = run_on(two_of_each(hosts), _offloaded, disks)
    torch.manual_seed(0)
    model = Net()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ROWS, range(STEPS))
    assert_mean([rank.in_memory for rank in found], expected)
    assert [rank.on_disk for rank in found] == [rank.in_memory for rank in found]
    for first, second in (found[:2], found[2:]):
        assert first.taken == second.taken == first.opened + second.opened
        # Half of the model: parameters, gradients and two moments.
        assert first.taken >= 16 * sum(p.numel() for p in model.parameters()) // 2
    assert_left_nothing(hosts[:2], disks)
