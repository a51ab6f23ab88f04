"""Kernels of Triton, each compiled by one of a host's ranks: the others wait for it, and find it in Triton's cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Inside, Inductor's processes compile each kernel once on a host, whatever devices its ranks have.

    Inductor gives each device a cache of Triton's own, so that eight ranks compile each kernel eight times. What Triton
    knows a kernel by is the kind of its device, and not which one it is. Seen in 2.13.
    """
    before, by_device = os.environ.get(_CACHE), Path(cache_dir(), "triton")
    if before is None or Path(before).parent == by_device:  # Inductor's own: the user's may be that of several hosts
        os.environ[_CACHE] = str(by_device / "of-the-host")
    try:
        with patch.object(async_compile, "_worker_compile_triton", _compile_once):
            yield
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before


def _compile_once(load_kernel: partial[Any], environment: dict[str, str], *settings: Any) -> Any:
    """As Inductor's own function, in one of its processes; while another process compiles the kernel, this waits.

    The kernel's name and source are the arguments of ``load_kernel``.
    """
    key = hashlib.sha256(_WHICH_DEVICE.sub("", repr(load_kernel.args)).encode()).hexdigest()
    os.makedirs(environment[_CACHE], exist_ok=True)
    with FileLock(Path(environment[_CACHE], f"{key}.lock"), timeout=LOCK_TIMEOUT):
        return _worker_compile_triton(load_kernel, environment, *settings)
