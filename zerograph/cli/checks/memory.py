"""Host memory: how much, how much may be locked, shared between processes, and in huge pages."""

from __future__ import annotations

import mmap
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from zerograph.cli.checks.finding import Finding
from zerograph.core.units import format_bytes
from zerograph.measure.host import host_memory

_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LOCK_ENOUGH = 2**30
_CAP_IPC_LOCK = 14
_PAGE = 2**20
# What a rank does: memory without a name, whose descriptor others open through /proc.
_PEER = """
import os, sys
fd = os.memfd_create("zerograph-doctor")
os.write(fd, b"seen")
print(fd, flush=True)
sys.stdin.read()
"""


def memory() -> Finding:
    """Host memory that this process may use, and processors."""
    import psutil

    total, free = host_memory(), psutil.virtual_memory().available
    cores = len(os.sched_getaffinity(0))
    return Finding("host", "ok", f"{format_bytes(total)} memory, {format_bytes(min(free, total))} free, {cores} cores")


def memlock() -> Finding:
    """How much memory may be locked: registered I/O buffers and RDMA count against it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock limit", "ok", "unlimited")
    # The limit does not hold for a process with this capability, as for root.
    if _capabilities() >> _CAP_IPC_LOCK & 1:
        return Finding("memlock limit", "ok", f"{format_bytes(soft)}, and this process may pass it (CAP_IPC_LOCK)")
    if soft >= _LOCK_ENOUGH:
        return Finding("memlock limit", "ok", format_bytes(soft))
    mend = "ulimit -l unlimited  # for good: /etc/security/limits.conf; in Docker: --ulimit memlock=-1"
    return Finding("memlock limit", "warning", f"{format_bytes(soft)}: little for I/O buffers and RDMA", mend)


def _capabilities() -> int:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1], 16) if match else 0


def shared_memory() -> Finding:
    """A process can open the memory of another one, as ranks of one host do for their collectives."""
    scope = f"ptrace_scope {_PTRACE.read_text().strip()}" if _PTRACE.exists() else "no ptrace_scope"
    peer = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert peer.stdout is not None
        seen = _seen(f"/proc/{peer.pid}/fd/{int(peer.stdout.readline())}")
    except OSError as error:
        fact = f"another process's memory cannot be opened ({error.strerror}, {scope}): CPU ranks fall back to gloo"
        mend = "run all ranks in one container as one user; sudo sysctl kernel.yama.ptrace_scope=0"
        return Finding("shared memory", "warning", fact, mend)
    finally:
        peer.communicate()
    if not seen:
        return Finding("shared memory", "warning", f"another process's memory reads wrong ({scope})")
    return Finding("shared memory", "ok", f"another process's memory can be mapped ({scope})")


def _seen(path: str) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, 4) as view:
            return view[:] == b"seen"
    finally:
        os.close(fd)


def huge_pages() -> Finding:
    """The kernel gives 2 MiB pages to memory that asks for them, as staging buffers of I/O do."""
    setting = re.search(r"\[(\w+)\]", _HUGE.read_text()) if _HUGE.exists() else None
    if setting is None or setting[1] == "never":
        fact = "off: direct I/O into 4 KiB pages runs at a third of the speed"
        return Finding("huge pages", "warning", fact, f"echo madvise | sudo tee {_HUGE}")
    got = _huge_bytes()
    if got:
        return Finding("huge pages", "ok", f"{setting[1]}; asked for 8 MiB, got {format_bytes(got)}")
    fact = f"{setting[1]}, but 8 MiB that asked for them got none (fragmented memory?)"
    return Finding("huge pages", "warning", fact, "echo 1 | sudo tee /proc/sys/vm/compact_memory")


def _huge_bytes() -> int:
    with mmap.mmap(-1, 8 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        before = _anonymous_huge()
        area.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, len(area), mmap.PAGESIZE):
            # Pages come when they are touched.
            area[offset] = 1
        return max(0, _anonymous_huge() - before)


def _anonymous_huge() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    match = re.search(r"^AnonHugePages:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
