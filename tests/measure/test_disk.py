"""The disk of a folder, really written and read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zerograph.core.errors import ConfigError
from zerograph.measure import disk
from zerograph.measure.disk import BLOCK, file_system, measure_disk, open_scratch

SIZE = 8 * BLOCK


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_is_measured_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(disk, "open_scratch", without_direct)
    found = measure_disk(tmp_path, SIZE, 1.0)
    assert found.direct <= direct
    assert found.capacity > 0 or found.file_system == "tmpfs"
    for link in (found.read, found.write):
        assert 1e6 < link.rate < 1e12 and 0 < link.latency < 0.1
    assert 1e6 < found.both < 1e12
    assert not list(tmp_path.iterdir())


def without_direct(folder: Path, *, direct: bool) -> int:
    if direct:
        raise OSError(errno.EINVAL, "Invalid argument")
    return open_scratch(folder, direct=False)


def test_a_slow_disk_is_given_up_in_time_and_reads_only_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    def spy(fd: int) -> disk.Transfer:
        def read(block: memoryview, offset: int) -> int:
            places.append(offset)
            return os.preadv(fd, [block], offset)

        return read

    monkeypatch.setattr(disk, "_read", spy)
    measure_disk(tmp_path, 64 * BLOCK, 0.0)
    assert max(places) < disk.THREADS * BLOCK  # every thread wrote one block before it looked at the clock


def test_a_round_that_others_disturb_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([5e8, 4e8, 9e8, 3e8, 1e6, 2e6, 1e6, 5e8, 8e8, 4e8])
    monkeypatch.setattr(disk, "_rate", lambda *args: (next(rates), SIZE))
    found = measure_disk(tmp_path, SIZE, 1.0)
    # The first is for making the file; then one to write, one to read and one for both, three times.
    assert (found.write.rate, found.read.rate, found.both) == (4e8, 8e8, 6e8)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory") as caught:
        measure_disk(tmp_path / "none", SIZE, 1.0)
    assert "--path" in caught.value.hint


def test_a_short_transfer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_write", lambda fd: lambda block, offset: len(block) // 2)
    with pytest.raises(ConfigError, match="moved 2097152 of 4194304 bytes at 0"):
        measure_disk(tmp_path, SIZE, 1.0)


def test_file_systems_have_names(tmp_path: Path) -> None:
    assert file_system(Path("/proc")) == "proc"
    assert file_system(tmp_path) not in ("", "unknown")
