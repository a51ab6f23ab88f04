"""The host's memory and processors, and whether there is a GPU. No torch in here."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def host_memory() -> int:
    """Bytes of memory that processes here may use: the machine's, or the container's limit."""
    import psutil

    total: int = psutil.virtual_memory().total
    return min([total, *filter(None, map(_limit, _LIMITS))])


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def may_have_gpu() -> bool:
    """False where no GPU driver is loaded; spares the import of torch, which knows for certain."""
    return any(path.exists() for path in _DEVICES)


class Others:
    """The load of other processes on the processors, from when it is made: time stolen by a hypervisor's guests,
    too."""

    def __init__(self) -> None:
        self._before = busy_seconds(), our_seconds(), time.monotonic()

    def share(self, beside: float = 0.0) -> float:
        """The share of all processors until now that others took. Our children count once they have ended; ``beside``
        are the CPU seconds of processes that count, too."""
        busy, ours, start = self._before
        elapsed = (time.monotonic() - start) * (os.cpu_count() or 1)
        return max(0.0, (busy_seconds() - busy) - (our_seconds() - ours) - beside) / max(elapsed, 1e-9)


def busy_seconds() -> float:
    """CPU seconds spent on this machine since it started, by anyone, on anything but idling."""
    import psutil

    times = psutil.cpu_times()
    # Guests are counted in user time already.
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def our_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
