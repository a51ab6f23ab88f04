"""The host's memory beside a device's: copies between the two that go on while the device computes.

On a GPU, memory here is pinned and each direction has a stream of its own. A CPU has one memory; on a machine that is
said to be split (:attr:`~zerograph.core.machine.Machine.split`) a thread copies within it, so that what runs on a GPU is
tested without one: whoever does not wait for a copy reads not-a-number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Copying:
    """A copy under way.

    Attributes:
        source, target: kept alive until it is done.
        done: what says so.
    """

    source: Tensor
    target: Tensor
    done: Any


class HostMemory:
    """The host of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = _Streams(device) if device.type == "cuda" else _Thread()
        self._pins = device.type == "cuda"

    def empty(self, size: int) -> Tensor:
        """Uninitialized host memory of so many bytes, pinned where the system permits it."""
        if self._pins:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                log.warning(
                    "host memory cannot be pinned, and copies will be slower: %s", str(error).partition("\n")[0]
                )
        return torch.empty(size, dtype=torch.uint8)

    def home(self, local: Tensor) -> Tensor:
        """The values of ``local`` on the host, in the same order of memory; it itself where it is there."""
        if local.is_cpu and not self._pins:
            return local.detach()
        flat = local.detach().as_strided((local.numel(),), (1,))  # dense, in whatever order
        home = self.empty(flat.nbytes).view(flat.dtype)
        home.copy_(flat)
        return home.as_strided(local.shape, local.stride())

    def start(self, source: Tensor, target: Tensor) -> Copying:
        """Begin to copy ``source`` to ``target``, one on the device and one here, once what computes now is done."""
        return Copying(source, target, self._copies.start(source, target))

    def wait(self, copying: Copying) -> None:
        """Let what follows see the copy: on the device what is computed next, here this thread."""
        self._copies.wait(copying.done, onto_device=copying.source.is_cpu and copying.target.device == self.device)


class _Thread:
    """Copies of a split machine."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zerograph-copy")

    def start(self, source: Tensor, target: Tensor) -> Any:
        if target.is_floating_point():
            target.fill_(torch.nan)
        return self._pool.submit(_copy, target, source)

    def wait(self, done: Any, onto_device: bool) -> None:
        done.result()


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


class _Streams:
    """Copies of a GPU: a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[bool, torch.cuda.Stream] = {}

    def start(self, source: Tensor, target: Tensor) -> Any:
        up = target.device == self._device
        stream = self._streams.get(up)
        if stream is None:
            stream = self._streams[up] = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def wait(self, done: Any, onto_device: bool) -> None:
        # The device's memory may be used again by what is computed next: that waits, in both directions.
        torch.cuda.current_stream(self._device).wait_event(done)
        if not onto_device:
            done.synchronize()


Allocate = Callable[[int], Tensor]
