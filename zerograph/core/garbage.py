"""Work during which Python looks for no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python not search for cycles meanwhile, where much is made and stays alive.

    A search looks through all of it, again and again: a fifth of tracing a deep model, and a quarter of a search for a
    plan.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
