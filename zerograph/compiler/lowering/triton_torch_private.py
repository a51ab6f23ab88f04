"""Kernels of Triton, each compiled by one of the ranks that share a cache: the others wait, and find it there."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch._inductor import async_compile
from torch._inductor.codecache import LOCK_TIMEOUT
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from torch.utils._filelock import FileLock

_CACHE = "TRITON_CACHE_DIR"
_WHICH_DEVICE = re.compile(r"\bindex=\d+")


@contextmanager
def triton_kernels_once() -> Iterator[None]:
    """Inside, the ranks that share Inductor's cache, as those of a host do, compile each kernel once.

    Inductor gives each device a cache of Triton's own, so that eight ranks compile each kernel eight times. What Triton
    knows a kernel by is the kind of its device, and not which one it is. Seen in 2.13.
    """
    before, by_device = os.environ.get(_CACHE), Path(cache_dir(), "triton")
    if before is None or Path(before).parent == by_device:  # else it is the user's, and all devices have it
        os.environ[_CACHE] = str(by_device / "of-all-devices")
    try:
        with patch.object(async_compile, "_worker_compile_triton", _compile_once):
            yield
    finally:
        _set_cache(before)


def _compile_once(load_kernel: partial[Any], environment: dict[str, str], *settings: Any) -> Any:
    """As Inductor's own function, in one of its processes; while another process compiles the kernel, this waits.

    The kernel's name and source are the arguments of ``load_kernel``.
    """
    key = hashlib.sha256(_WHICH_DEVICE.sub("", repr(load_kernel.args)).encode()).hexdigest()
    before, lock = os.environ.get(_CACHE), FileLock(Path(environment[_CACHE], f"{key}.lock"), timeout=LOCK_TIMEOUT)
    # Of a cache that is read only, or has no locks, each rank takes what there is, and compiles what is missing.
    with suppress(OSError, NotImplementedError):
        os.makedirs(environment[_CACHE], exist_ok=True)
        lock.acquire()
    try:
        return _worker_compile_triton(load_kernel, environment, *settings)
    finally:
        lock.release()
        _set_cache(before)  # Inductor's function leaves the caller's in a process that serves other compilations, too


def _set_cache(folder: str | None) -> None:
    if folder is None:
        os.environ.pop(_CACHE, None)
    else:
        os.environ[_CACHE] = folder
