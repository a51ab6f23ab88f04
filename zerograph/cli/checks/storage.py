"""Disks: direct I/O on a path, its free space, and io_uring."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
from pathlib import Path

from zerograph.cli.checks.finding import Finding, first_line
from zerograph.core.units import format_bytes
from zerograph.measure.disk import file_system, open_scratch

_URING_SETUP = 425  # the same number on every architecture
_URING_PARAMS = 120  # bytes of struct io_uring_params
_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_SIZE = 2**20
_ROOM = 32 * 10**9


def io_uring() -> Finding:
    """The kernel gives this process an io_uring queue: the system call is really made."""
    code = _try_io_uring()
    if code == 0:
        return Finding("io_uring", "ok", "permitted")
    fact = f"{errno.errorcode.get(code, code)} ({os.strerror(code)}): I/O goes through a pool of threads"
    return Finding("io_uring", "warning", fact, _uring_mend(code))


def _try_io_uring() -> int:
    """0, or the errno of ``io_uring_setup``."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_URING_PARAMS)
    fd = libc.syscall(ctypes.c_long(_URING_SETUP), ctypes.c_uint(8), params)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def _uring_mend(code: int) -> str:
    if code == errno.ENOSYS:
        return "a kernel of 5.1 or newer with CONFIG_IO_URING"
    if code == errno.ENOMEM:
        return "ulimit -l unlimited"
    if _DISABLED.exists() and _DISABLED.read_text().strip() != "0":
        return "sudo sysctl kernel.io_uring_disabled=0"
    return "docker run --security-opt seccomp=unconfined  # or a profile that permits io_uring_setup"


def direct_io(path: Path) -> Finding:
    """An aligned file on ``path`` is really written and read with O_DIRECT; nothing of it stays."""
    where = f"{path} ({file_system(path)})"
    try:
        _round_trip(path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            fact = f"{where} refuses it: I/O goes through the page cache, with a copy more"
            return Finding("O_DIRECT", "warning", fact, "zerograph doctor --path DIR  # on ext4, xfs or btrfs")
        fact = f"{where}: {errno.errorcode.get(error.errno or 0, '?')} ({error.strerror})"
        return Finding("O_DIRECT", "missing", fact, "zerograph doctor --path DIR  # that can be written")
    return Finding("O_DIRECT", "ok", f"{where}: wrote and read {format_bytes(_SIZE)}")


def _round_trip(path: Path) -> None:
    pattern = bytes(range(256)) * (_SIZE // 256)
    fd = open_scratch(path, direct=True)
    try:
        with mmap.mmap(-1, _SIZE) as sent, mmap.mmap(-1, _SIZE) as received:  # mappings are aligned to pages
            sent[:] = pattern
            wrote, read = os.pwrite(fd, sent, 0), os.preadv(fd, [received], 0)
            if (wrote, read) != (_SIZE, _SIZE) or received[:] != pattern:
                raise OSError(errno.EIO, f"wrote {wrote} bytes, read {read}, not all of them right")
    finally:
        os.close(fd)


def io_engine(path: Path) -> Finding:
    """The engine that moves offloaded tensors really writes and reads a slab on ``path``; nothing of it stays."""
    import zerograph._core as _core

    wanted = os.environ.get("ZEROGRAPH_IO") or "auto"
    try:
        engine = _core.IoEngine(wanted, depth=2, buffers=1)
        slab = _core.Slab(str(path.resolve()), _SIZE)
        file = engine.attach(slab.fd, slab.path, slab.memory_alignment, slab.offset_alignment)
        memory = _core.HugeMemory(_SIZE)
        for direction in (_core.Direction.write, _core.Direction.read):
            engine.wait(engine.submit(direction, [(file, 0, memory.address, _SIZE, False)], _core.Priority.now))
        engine.close()
    except (OSError, ValueError) as error:
        hint = str(error).partition("hint: ")[2] or "zerograph doctor --path DIR  # that can be written"
        return Finding("I/O engine", "missing", first_line(error), hint)
    way = f"O_DIRECT from memory at multiples of {slab.memory_alignment}" if slab.direct else "through the page cache"
    fact = f"{engine.name}{' (ZEROGRAPH_IO)' if wanted != 'auto' else ''} on {path}: {way}"
    notes = "; ".join((engine.notes + slab.notes).splitlines())
    if not _core.has_uring() and wanted != "threads":
        mend = "apt install liburing-dev, and install zerograph again from its clone"
        return Finding("I/O engine", "warning", f"{fact}; {notes}", mend)
    if notes:
        return Finding("I/O engine", "warning", f"{fact}; {notes}", "mend io_uring or the memlock limit, see there")
    return Finding("I/O engine", "ok", fact)


def free_space(path: Path) -> Finding:
    """Room on ``path`` for what is offloaded to it."""
    free = shutil.disk_usage(path).free
    fact = f"{format_bytes(free)} on {path}"
    if free >= _ROOM:
        return Finding("free space", "ok", fact)
    fact += "; states of 1 B parameters take 12 GB"
    return Finding("free space", "warning", fact, "zerograph doctor --path DIR  # on a larger disk")
