"""The host of an accelerator, simulated within the memory of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from zerograph.core.machine import Way
from zerograph.runtime.buffers import BufferPool
from zerograph.runtime.offload.background import Background
from zerograph.runtime.offload.host import HostMemory, Pairs, Transfer
from zerograph.runtime.offload.nvme import huge_tensor
from zerograph.runtime.timings import Purpose, Timings


class SimulatedHost(HostMemory):
    """The host of a simulated accelerator: a CPU in a split machine (:attr:`~zerograph.core.machine.Machine.split`).

    A thread copies within the CPU's one memory, so that programs that move between host and device run without a GPU.
    Code that does not wait for a copy reads not-a-number.
    """

    def __init__(self) -> None:
        self.device, self.timings = torch.device("cpu"), Timings()
        self._copies = Background("zerograph-copy")
        self._above, self._staged = BufferPool(self.room), BufferPool(huge_tensor)

    @torch.inference_mode(False)
    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def stage(self, size: int) -> Tensor:
        return self._staged.take(size)

    def above(self, size: int) -> Tensor:
        """See :class:`~zerograph.runtime.offload.host.HostMemory`; used again when nothing reads it."""
        return self._above.take(size)

    def start(
        self, way: Way, pairs: Pairs, arrived: Callable[[], None] | None = None, *, purpose: Purpose | None = None
    ) -> _Copying:
        for _, target in pairs:
            # All bits of a byte: not-a-number in any dtype that looks at it.
            target.fill_(torch.nan if target.is_floating_point() else 0xFF)

        def job() -> None:
            if arrived is not None:
                arrived()
            begin = time.time_ns()
            _copy(pairs)
            self.timings.add(way, purpose, begin, time.time_ns())

        return _Copying(self.after_copies(job))

    def after_copies(self, job: Callable[[], None]) -> Future[None]:
        # Tensors of the caller's may be made in inference mode, which threads do not inherit.
        return self._copies.start(torch.inference_mode()(job))


class _Copying(Transfer):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    arrive = wait


def _copy(pairs: Pairs) -> None:
    for source, target in pairs:
        target.copy_(source)
