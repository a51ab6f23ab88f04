"""What malloc keeps of memory that nobody uses."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

log = logging.getLogger(__name__)

LARGE = 2**20
"""Bytes of a block that goes back to the system when it is free."""
TRIM = 16 * 2**20
"""Bytes at the end of the heap that stay, so that small blocks do not ask the system again and again."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of <malloc.h>
_OWN = ("MALLOC_MMAP_THRESHOLD_", "mmap_threshold")


@functools.cache
def return_large_blocks() -> bool:
    """Let glibc give blocks of :data:`LARGE` bytes back as soon as they are free, in all of this process; whether it
    does.

    By itself it serves blocks of up to 32 MiB from its heap once one of them has been freed. There gathered buckets,
    gradients and activations are allocated among each other, and what is free in between stays the process's, more of
    it from step to step. Each block then costs the page faults of new memory. Whoever has set a threshold in the
    environment (``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) keeps that.
    """
    if _OWN[0] in os.environ or _OWN[1] in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    done = mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, LARGE)) and bool(mallopt(_TRIM_THRESHOLD, TRIM))
    log.info("malloc %s blocks of 1 MiB and more back when they are free", "gives" if done else "cannot give")
    return done
