"""The host's memory beside a device's: copies between the two that go on while the device computes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Sources and targets of one transfer, of which one are on the host and the others on the device."""

AfterCopies = Callable[[Callable[[], None]], Future[None]]
"""Has a job done on the host, after all copies that were begun before it."""


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
    """

    device: torch.device

    @property
    def after_copies(self) -> AfterCopies | None:
        """See :data:`AfterCopies`. Writes to NVMe behind the host need it; None where that is not supported."""

    def room(self, size: int) -> Tensor:
        """So many bytes on the host, which the device can copy from and to by itself."""

    def above(self, size: int) -> Tensor:
        """So many bytes on the device."""

    def start(self, pairs: Pairs, arrived: Callable[[], None] = ...) -> Transfer:
        """Begin to copy each source to its target, once the device has done all that it was told before, and
        ``arrived()`` has returned: sources have their values then."""


class AcceleratorHost:
    """The host of an accelerator, with a stream of its own for each direction.

    A transfer begins when the compute stream has come to where it was started, so that memory is used again in its
    order. Compute waits for the event at a transfer's end, and for nothing else; whoever holds a transfer keeps its
    tensors alive until then, so that the allocator needs to know of no second stream.
    """

    after_copies = None  # a thread would have to wait for the events of copies

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up, self._down = torch.Stream(device=device), torch.Stream(device=device)

    @torch.inference_mode(False)  # an evaluation's memory serves training afterwards
    def room(self, size: int) -> Tensor:
        """See :class:`HostMemory`; page-locked."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # a limit on locked memory
            _warn_of_pageable(str(error).partition("\n")[0])
            return torch.empty(size, dtype=torch.uint8)

    def above(self, size: int) -> Tensor:
        """See :class:`HostMemory`; torch's allocator keeps it between steps."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def start(self, pairs: Pairs, arrived: Callable[[], None] = lambda: None) -> _Event:
        """See :class:`HostMemory`."""
        arrived()
        stream = self._down if pairs[0][1].is_cpu else self._up
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return _Event(stream.record_event(), self.device, pairs)


class _Event:
    def __init__(self, end: torch.Event, device: torch.device, pairs: Pairs) -> None:
        self._end, self._device, self._pairs = end, device, pairs

    def wait(self) -> None:
        """See :class:`Transfer`."""
        torch.accelerator.current_stream(self._device).wait_event(self._end)
        self._pairs = ()  # what uses their memory from here on does so after the transfer

    def arrive(self) -> None:
        """See :class:`Transfer`."""
        self._end.synchronize()


@functools.cache
def _warn_of_pageable(reason: str) -> None:
    log.warning(
        "the host's memory cannot be page-locked (%s): copies to and from the device wait for the processor, and take "
        "two to three times as long; raise the limit on locked memory (ulimit -l)",
        reason,
    )
