"""How much room a rank has: on its device, and on NVMe and in the host's memory, which ranks share."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zerograph.core.config import Config
from zerograph.core.machine import Tier

Disk = tuple[str, int]
"""A key that tells a file system, or the memory of a host, apart from those of other hosts, and its free bytes."""


def memory_here() -> Disk:
    """The memory of this host, and what of it programs may still take."""
    import psutil

    return f"{_host()} memory", psutil.virtual_memory().available


GRAIN = 256 * 2**20
"""Bytes that a GPU's room is rounded down to: the next start, with other crumbs free, then finds the same plans."""


def room_on(device: torch.device) -> int:
    """Bytes of a GPU that this process may use: those that are free, and those that torch's allocator has, in which the
    model lies. The context, communicators and other processes have the rest."""
    return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) // GRAIN * GRAIN


def disks(folders: Iterable[str]) -> list[Disk]:
    """The file system of each of ``folders``; whoever opens files there says what is wrong with one."""
    found = []
    for folder in folders:
        try:
            room = os.statvfs(folder)
            if room.f_blocks:  # else it is no place for files at all
                found.append((f"{_host()} {os.stat(folder).st_dev}", room.f_bavail * room.f_frsize))
        except OSError:
            continue
    return found


def free_room(config: Config, device: str) -> dict[Tier, list[Disk]]:
    """The free memory of the tiers beside a ``device`` of that type, as far as ``config`` uses it and does not bound
    it."""
    found = {disk: disks(folders) for disk, folders in config.folders.items()}
    uses_host = "host" in config.offload_tiers or (config.searches_tiers and device != "cpu")
    return found | ({"host": [memory_here()]} if uses_host and config.host_memory is None else {})


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def rooms(by_rank: Sequence[Sequence[Disk]]) -> list[int]:
    """Bytes that each rank may reserve, where all reserve as many in each of their folders.

    Args:
        by_rank: the folders' file systems, by rank.
    """
    users = Counter(disk for own in by_rank for disk, _ in own)
    free: dict[str, int] = {}
    for disk, size in (one for own in by_rank for one in own):
        free[disk] = min(size, free.get(disk, size))  # ranks look one after another, while others write
    return [len(own) * min(free[disk] // users[disk] for disk, _ in own) if own else sys.maxsize for own in by_rank]
