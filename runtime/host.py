"""The host's memory beside a device's: copies between the two that go on while the device computes.

No GPU is served yet. A CPU has one memory; on a machine that is said to be split
(:attr:`~zerograph.core.machine.Machine.split`) a thread copies within it, so that programs which move between the two
run without a GPU: whoever does not wait for a copy reads not-a-number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class HostMemory:
    """The host of one device."""

    def __init__(self) -> None:
        self._threads: dict[int, ThreadPoolExecutor] = {}  # by process: a fork has none of its parent's

    def start(self, source: Tensor, target: Tensor, arrived: Callable[[], None] = lambda: None) -> Future[None]:
        """Begin to copy ``source`` to ``target``; nobody may write to either, or read the second, until ``result()`` of
        what is returned. ``arrived`` is called first, in the thread, and returns when ``source`` has its values."""
        # All bits of a byte: not-a-number in any dtype that looks at it.
        target.fill_(torch.nan if target.is_floating_point() else 0xFF)

        def job() -> None:
            arrived()
            _copy(target, source)

        return self.run(job)

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Have ``job`` done where copies are made, after all that was begun before."""
        thread = self._threads.get(os.getpid())
        if thread is None:
            thread = self._threads[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="zerograph-copy")
        return thread.submit(_run, job)


@torch.inference_mode()  # in which tensors of the caller's may be made, and which threads do not inherit
def _run(job: Callable[[], None]) -> None:
    job()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
