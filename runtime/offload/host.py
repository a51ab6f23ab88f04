"""The host's memory beside a device's: copies between the two that go on while the device computes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from zerograph.core.machine import Way
from zerograph.core.slots import SLOTS
from zerograph.runtime.offload.background import Background
from zerograph.runtime.offload.nvme import huge_tensor
from zerograph.runtime.timings import Purpose, Timings
from zerograph.runtime.torch_private import memory_is_unshared

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Sources and targets of one transfer, of which one are on the host and the others on the device."""


class Transfer(Protocol):
    """Copies under way. Until they are waited for nobody may write to either side, or read the targets."""

    def wait(self) -> None:
        """Let whatever the device does from here on find the targets complete."""

    def arrive(self) -> None:
        """Return when the targets are complete."""


class HostMemory(Protocol):
    """The host of one device.

    Attributes:
        device: the other memory.
        timings: hear of copies, for recordings.
    """

    device: torch.device
    timings: Timings

    def room(self, size: int) -> Tensor:
        """So many bytes on the host, which the device can copy from and to by itself."""

    def stage(self, size: int) -> Tensor:
        """So many bytes on the host, for what is on its way between a disk and the device; used again when nothing
        reads or writes them any more."""

    def above(self, size: int) -> Tensor:
        """So many bytes on the device."""

    def start(
        self, way: Way, pairs: Pairs, arrived: Callable[[], None] | None = None, *, purpose: Purpose | None = None
    ) -> Transfer:
        """Begin to copy each source to its target, once the device has done all that it was told before, and
        ``arrived()`` has returned, where it is given: sources have their values then. What that raises, waiting for
        the transfer raises. A recording tells copies on their ``way`` by their ``purpose``."""

    def after_copies(self, job: Callable[[], None]) -> Future[None]:
        """Have a job done on the host, after all copies that were begun before it."""


class AcceleratorHost(HostMemory):
    """The host of an accelerator, with a stream of its own for each direction.

    A transfer begins when the compute stream has come to where it was started, so that memory is used again in its
    order. Compute waits for the event at a transfer's end, and for nothing else; whoever holds a transfer keeps its
    tensors alive until then, so that the allocator needs to know of no second stream. Memory of the host is kept until
    the event has passed: disks write to it in no stream's order.

    What has to wait for a disk or for the device on the host does so in two threads, one for each direction.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.timings = device, Timings()
        self._up, self._down = torch.Stream(device=device), torch.Stream(device=device)
        self._rising, self._leaving = Background("zerograph-copy-up"), Background("zerograph-copy-down")
        self._under_way: list[_Copying] = []  # each keeps its memory on the host
        self._lock = threading.Lock()  # updates copy in a thread of their own
        self._staged: list[Tensor] = []

    @torch.inference_mode(False)  # an evaluation's memory serves training afterwards
    def room(self, size: int) -> Tensor:
        """See :class:`HostMemory`; page-locked."""
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:  # a limit on locked memory
            _warn_of_pageable(str(error).partition("\n")[0])
            return torch.empty(size, dtype=torch.uint8, device="cpu")

    def stage(self, size: int) -> Tensor:
        """See :class:`HostMemory`; page-locked. The host waits for the device where it is so far ahead that memory for
        more than a ring of slots would be needed."""
        with self._lock:
            while len(self._under_way) > SLOTS:
                self._under_way[0].end()
                self._under_way.pop(0)
            self._forget_ended()
            # All are kept: to lock pages takes long, and to unlock them may wait for the device.
            free = [room for room in self._staged if size <= len(room) <= 2 * size and memory_is_unshared(room)]
            room = min(free, key=len, default=None)
            if room is None:
                room = self._pinned(size)
                self._staged.append(room)
            return room[:size]

    @torch.inference_mode(False)
    def _pinned(self, size: int) -> Tensor:
        """Memory of this very size: torch's own page-locked memory has a power of two."""
        driver = getattr(torch.get_device_module(self.device), "cudart", None)
        if driver is None or not size:
            return self.room(size)
        memory = huge_tensor(size)
        failed = int(driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if failed:
            _warn_of_pageable(f"error {failed} of cudaHostRegister")
            with contextlib.suppress(RuntimeError):  # the next kernel would be told of it
                torch.ones(1, device=self.device)
        else:
            unlocked = weakref.finalize(memory, _unlock, os.getpid(), driver().cudaHostUnregister, memory.data_ptr())
            unlocked.atexit = False  # copies may be under way
        return memory

    def above(self, size: int) -> Tensor:
        """See :class:`HostMemory`; torch's allocator keeps it between steps."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def start(
        self, way: Way, pairs: Pairs, arrived: Callable[[], None] | None = None, *, purpose: Purpose | None = None
    ) -> _Copying:
        stream = self._down if way == "d2h" else self._up
        before = torch.accelerator.current_stream(self.device).record_event()

        @torch.inference_mode()  # in which tensors of the caller's may be made, and which threads do not inherit
        def copy() -> torch.Event:
            if arrived is not None:
                arrived()
            stream.wait_event(before)
            try:
                ended = self.timings.add_told(way, purpose, stream)
                with stream:
                    for source, target in pairs:
                        target.copy_(source, non_blocking=True)
                ended()
                return stream.record_event()
            except BaseException:
                stream.synchronize()  # what was begun uses memory that nobody keeps from here on
                raise

        copying = _Copying(self.device, pairs)
        if arrived is None:
            copying.begun.set_result(copy())
        else:
            self._rising.start(lambda: copying.begin(copy), self.device)
        with self._lock:
            self._forget_ended()
            self._under_way.append(copying)
        return copying

    def _forget_ended(self) -> None:
        ended = [copying for copying in self._under_way if copying.has_ended()]
        for copying in ended:
            copying.end()
            self._under_way.remove(copying)

    def after_copies(self, job: Callable[[], None]) -> Future[None]:
        copied = self._down.record_event()

        @torch.inference_mode()
        def work() -> None:
            copied.synchronize()
            job()

        return self._leaving.start(work, self.device)


class _Copying(Transfer):
    """A transfer.

    Attributes:
        begun: gives the event at its end, once that is recorded.
    """

    def __init__(self, device: torch.device, pairs: Pairs) -> None:
        self._device, self._pairs = device, pairs
        self._on_host = [tensor for pair in pairs for tensor in pair if tensor.is_cpu]
        self.begun: Future[torch.Event] = Future()

    def begin(self, copy: Callable[[], torch.Event]) -> None:
        """Begin in another thread than the one that waits."""
        try:
            self.begun.set_result(copy())
        except BaseException as error:
            # Tracebacks hold tensors, and this one itself.
            self._pairs, self._on_host, error.__context__ = (), [], None
            self.begun.set_exception(error.with_traceback(None))

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self.begun.result())
        self._pairs = ()  # what uses the device's memory from here on does so after the transfer

    def arrive(self) -> None:
        self.begun.result().synchronize()

    def has_ended(self) -> bool:
        """Whether :meth:`end` would return at once."""
        return self.begun.done() and (self.begun.exception() is not None or self.begun.result().query())

    def end(self) -> None:
        """Let go of the memory on the host when nothing is copied any more, whatever became of it."""
        with contextlib.suppress(Exception):  # whoever waits for the transfer hears of it
            self.arrive()
        self._on_host = []


def _unlock(pid: int, unregister: Callable[[int], object], address: int) -> None:
    if os.getpid() == pid:  # else a child's copy, whose pages are not locked
        unregister(address)


@functools.cache
def _warn_of_pageable(reason: str) -> None:
    log.warning(
        "the host's memory cannot be page-locked (%s): copies to and from the device wait for the processor, and take "
        "two to three times as long; raise the limit on locked memory (ulimit -l)",
        reason,
    )
