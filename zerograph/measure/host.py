"""The host's memory and processors, and whether there is a GPU. No torch in here."""

from __future__ import annotations

import os
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
