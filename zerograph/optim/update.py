"""An update that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

import zerograph._core as _core
from zerograph.optim.parts import Part
from zerograph.optim.tensors import Gradients


class PendingUpdate:
    """The result of :meth:`HostOptimizer.start_step`. It keeps all tensors alive that kernels are working on."""

    def __init__(
        self,
        ticket: _core.Ticket | None,
        touched: Sequence[tuple[Part, Gradients]],
        streams: Sequence[Callable[[], None]] = (),
        updated: Callable[[Sequence[Tensor]], None] = lambda _: None,
    ) -> None:
        """``streams`` update what passes through slots, in the thread that waits; ``updated`` hears of all that was."""
        self._ticket, self._touched, self._streams, self._updated = ticket, touched, streams, updated
        self._beside: Future[None] | None = None
        self.failed: Callable[[BaseException], None] = lambda _: None  # hears of an error in wait()

    def stream_beside(self, start: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Let ``streams`` run beside the caller, where ``start`` begins them; :meth:`wait` then waits for them."""
        streams = self._streams
        if streams:

            def run(_: object = self._touched) -> None:  # which kernels read by address, whatever becomes of this
                for stream in streams:
                    stream()

            self._beside = start(run)
            self._streams = (self._beside.result,)

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        streamed = not self._streams or (self._beside is not None and self._beside.done())
        return streamed and (self._ticket is None or self._ticket.done())

    def wait(self) -> None:
        """Return once everything is updated. A second call does nothing.

        Raises:
            StorageError: a transfer failed, and a part of the states on NVMe is updated.
        """
        ticket, self._ticket = self._ticket, None
        touched, self._touched = self._touched, ()
        streams, self._streams = self._streams, ()
        try:
            for stream in streams:
                stream()
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            if ticket is not None:
                ticket.wait()
        for part, grads in touched:
            changed = part.updated(grads)
            self._updated(changed)

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None:
            ticket.wait()  # before the tensors go


def update_arrived(
    arrival: Callable[[], None], calls: Sequence[Any], factor: float, streams: Sequence[Callable[[], None]]
) -> None:
    """Update on the host, and through slots, by gradients that are there after ``arrival``."""
    arrival()
    if calls:
        _core.update(calls, factor).wait()
    for stream in streams:
        stream()
