"""Runs a block with Python's garbage collector off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Inside, Python's garbage collector is off, for work that makes many objects which stay alive.

    The collector looks through all of them again and again. That took a fifth of tracing a deep model and a quarter of
    a search for a plan.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # A user who switched it off keeps it off.
        if collects:
            gc.enable()
