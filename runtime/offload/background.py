"""One thread that works beside the caller's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


class Background:
    """A thread that runs given work one after another, and is made when it is first needed."""

    def __init__(self, name: str) -> None:
        """``name`` is what debuggers call the thread."""
        self._name = name
        self._threads: dict[int, ThreadPoolExecutor] = {}  # by process: a fork has none of its parent's
        self._under_way: dict[int, list[Future[None]]] = {}  # by process, too
        self._here = threading.local()

    def start(self, work: Callable[[], None], device: torch.device | None = None) -> Future[None]:
        """Begin ``work``; ``result()`` of what is returned waits for it, and raises what it raised.

        ``device``: where all work of this thread is, if that is an accelerator's.
        """
        thread = self._threads.get(os.getpid())
        if thread is None:
            thread = self._threads[os.getpid()] = ThreadPoolExecutor(1, self._name, _begin, (self._here, device))
        future = thread.submit(torch.no_grad()(work))
        self._under_way[os.getpid()] = [*(f for f in self._mine if not f.done()), future]
        return future

    @property
    def _mine(self) -> list[Future[None]]:
        return self._under_way.get(os.getpid(), [])

    def wait(self) -> None:
        """Return when nothing is under way, whatever became of it; at once in the thread itself."""
        if not hasattr(self._here, "is_own"):
            wait(self._mine)
            self._under_way[os.getpid()] = []  # an error would keep all that its frames refer to

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return all(future.done() for future in self._mine)


def _begin(here: threading.local, device: torch.device | None) -> None:
    """Mark the thread; it must not keep the object that made it, whose end is its own."""
    here.is_own = True
    if device is not None and device.type != "cpu":
        # A new thread is on device 0. Whoever records an event of another device there, or waits for it, returns to
        # device 0, and CUDA makes a context on that: half a GB for every rank of the host.
        torch.accelerator.set_device_index(device)
