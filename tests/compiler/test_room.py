"""Ranks share what is free on the disks that they write to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zerograph.compiler.room import disks, free_room, memory_here, rooms
from zerograph.core.config import Config


def test_folders_are_recognized_by_their_file_system(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (here, free), (same, _) = disks([str(tmp_path), str(tmp_path / "a")])
    room = os.statvfs(tmp_path)
    assert here == same and 0 < free <= room.f_blocks * room.f_frsize
    assert disks([str(tmp_path / "missing")]) == [] == disks([])


def test_memory_is_recognized_by_its_host(tmp_path: Path) -> None:
    (here, free), ((disk, _),) = memory_here(), disks([str(tmp_path)])
    assert here.split()[0] == disk.split()[0] and here != disk
    assert 0 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_ranks_share_what_is_free() -> None:
    assert rooms([[("a", 100)]]) == [100]
    assert rooms([[("a", 100)], [("a", 90)]]) == [45, 45]  # of one host: the least that any of them saw
    assert rooms([[("a", 100)], [("b", 300)]]) == [100, 300]
    assert rooms([[("a", 100), ("b", 300)]]) == [200]  # stripes are as long on each
    assert rooms([[("a", 100), ("a", 100)], [("a", 100)]]) == [66, 33]
    assert rooms([[("a", 100)], []]) == [100, sys.maxsize]


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        ({"offload": "auto"}, "cuda", True),
        ({"offload": "auto"}, "cpu", False),  # its host is the device
        ({"offload": "auto", "host_memory": "1GiB"}, "cuda", False),
        ({"offload": "auto", "tier": "nvme"}, "cuda", False),
        ({"offload": "optimizer"}, "cuda", False),
        ({"offload": "optimizer", "tier": "host"}, "cuda", True),
    ],
)
def test_the_hosts_free_memory_bounds_what_may_go_there(
    options: dict[str, str], device: str, host: bool, tmp_path: Path
) -> None:
    """Else a search would go by the host of a preset."""
    path = {} if options.get("tier") == "host" else {"path": str(tmp_path)}
    config = Config.of(memory="8GiB" if options["offload"] == "auto" else None, **path, **options)
    assert ("host" in free_room(config, device)) is host
