"""How fast a folder's disk reads and writes: large blocks, several in flight, past the page cache. No torch in here."""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zerograph.core.errors import ConfigError
from zerograph.core.machine import Link
from zerograph.core.units import format_bytes
from zerograph.measure.timing import ROUNDS, median_of

BLOCK = 4 * 2**20
THREADS = 4
"""Blocks in flight; a solid-state disk needs several to reach its rate."""
_PAGE = 4096
_PROBES = 32
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Disk:
    """The measurements of a disk. ``both`` is bytes per second of reads and writes that go on together; ``capacity``
    the free space in bytes, 0 where the folder is memory; ``direct`` whether O_DIRECT was possible."""

    read: Link
    write: Link
    both: float
    capacity: int
    direct: bool
    file_system: str


def measure_disk(folder: Path, size: int, limit: float) -> Disk:
    """Read and write a temporary file of ``size`` bytes in ``folder``, each for ``limit`` seconds at most in all.

    Raises:
        ConfigError: the folder cannot be written, or is full.
    """
    # Whole blocks, as O_DIRECT wants, and one for each thread at least.
    size = max(THREADS * BLOCK, size // BLOCK * BLOCK)
    try:
        room = os.statvfs(folder)
        with _scratch(folder) as (fd, direct):
            size = _allocate(fd, size, limit)
            rounds = []
            for _ in range(ROUNDS):
                share = limit / ROUNDS
                write = Link(_rate(_write(fd), size, share, lambda: os.fsync(fd))[0], _latency(_write(fd), size))
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # for reads that go through the page cache
                read = Link(_rate(_read(fd), size, share, lambda: None)[0], _latency(_read(fd), size))
                both = Link(2 * _rate(_rewrite(fd), size, share, lambda: os.fsync(fd))[0])
                rounds.append({"read": read, "write": write, "both": both})
            links = median_of(rounds)
    except OSError as error:
        hint = f"--path DIR with {format_bytes(size)} of free space that can be written"
        raise ConfigError(f"cannot measure the disk of {folder}: {error.strerror}", hint) from None
    kind = file_system(folder)
    capacity = 0 if kind in _IN_MEMORY else room.f_bavail * room.f_frsize
    return Disk(links["read"], links["write"], links["both"].rate, capacity, direct, kind)


def open_scratch(folder: Path, *, direct: bool) -> int:
    """Descriptor of a new file in ``folder`` whose name is gone already, so that nothing can stay.

    Raises:
        OSError: not permitted, or (EINVAL) the file system knows no O_DIRECT.
    """
    made, name = tempfile.mkstemp(prefix=".zerograph-", dir=folder)
    try:
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    finally:
        os.close(made)
        os.unlink(name)


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``: "ext4", "xfs", ..."""
    import psutil

    place = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if place.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"


@contextmanager
def _scratch(folder: Path) -> Iterator[tuple[int, bool]]:
    direct = True
    try:
        fd = open_scratch(folder, direct=True)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        direct, fd = False, open_scratch(folder, direct=False)
    try:
        yield fd, direct
    finally:
        os.close(fd)


BlockTransfer = Callable[[memoryview, int], int]


def _write(fd: int) -> BlockTransfer:
    return lambda block, offset: os.pwrite(fd, block, offset)


def _read(fd: int) -> BlockTransfer:
    return lambda block, offset: os.preadv(fd, [block], offset)


def _rewrite(fd: int) -> BlockTransfer:
    """Read and write again, of which the other threads do now the one and now the other."""
    return lambda block, offset: min(os.preadv(fd, [block], offset), os.pwrite(fd, block, offset))


def _allocate(fd: int, size: int, limit: float) -> int:
    """Write once, untimed, since training writes to extents that exist; returns how far that came."""
    with suppress(OSError):  # a hint that some file systems do not take
        os.posix_fallocate(fd, 0, size)
    return _rate(_write(fd), size, limit, lambda: os.fsync(fd))[1]


def _rate(transfer: BlockTransfer, size: int, limit: float, finish: Callable[[], None]) -> tuple[float, int]:
    """Bytes per second over blocks 0 .. ``size``, or as many as start within ``limit`` seconds, and their bytes."""
    offsets = iter(range(0, size, BLOCK))

    def work(block: memoryview) -> int:
        moved = 0
        for offset in offsets:  # all threads take from one iterator
            moved += _move_all(transfer, block, offset)
            if time.perf_counter() - begin > limit:
                break
        return moved

    with _blocks(THREADS, BLOCK) as blocks, ThreadPoolExecutor(THREADS) as pool:
        begin = time.perf_counter()
        moved = sum(pool.map(work, blocks))
        finish()
        return moved / (time.perf_counter() - begin), moved


@contextmanager
def _blocks(count: int, size: int) -> Iterator[list[memoryview]]:
    """Buffers of random bytes (disks may compress), aligned to pages, on huge pages where there are any."""
    with mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area, memoryview(area) as buffer:
        with suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
        buffer[:] = os.urandom(count * size)
        blocks = [buffer[i * size : (i + 1) * size] for i in range(count)]
        try:
            yield blocks
        finally:
            for block in blocks:
                block.release()


def _move_all(transfer: BlockTransfer, block: memoryview, offset: int) -> int:
    moved = transfer(block, offset)
    if moved != len(block):
        raise OSError(errno.EIO, f"moved {moved} of {len(block)} bytes at {offset}")
    return moved


def _latency(transfer: BlockTransfer, size: int) -> float:
    """Median seconds that one page takes, at places spread over the file."""
    seconds = []
    with _blocks(1, _PAGE) as [block]:
        for offset in range(0, size, size // _PROBES // _PAGE * _PAGE):
            begin = time.perf_counter()
            _move_all(transfer, block, offset)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
