"""The host's memory beside a device's: copies between the two that go on while the device computes.

No GPU is served yet. A CPU has one memory; on a machine that is said to be split
(:attr:`~zerograph.core.machine.Machine.split`) a thread copies within it, so that programs which move between the two
run without a GPU: whoever does not wait for a copy reads not-a-number.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class HostMemory:
    """The host of one device."""

    def __init__(self) -> None:
        self._threads: dict[int, ThreadPoolExecutor] = {}  # by process: a fork has none of its parent's

    def start(self, source: Tensor, target: Tensor) -> Future[None]:
        """Begin to copy ``source`` to ``target``; nobody may write to either, or read the second, until ``result()`` of
        what is returned."""
        thread = self._threads.get(os.getpid())
        if thread is None:
            thread = self._threads[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="zerograph-copy")
        # All bits of a byte: not-a-number in any dtype that looks at it.
        target.fill_(torch.nan if target.is_floating_point() else 0xFF)
        return thread.submit(_copy, target, source)


@torch.inference_mode()  # in which tensors of the caller's may be made, and which threads do not inherit
def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
