"""An update that is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from torch import Tensor

from zerograph import _core
from zerograph.optim.parts import Part
from zerograph.optim.tensors import Gradients


class PendingUpdate:
    """What :meth:`HostOptimizer.start_step` returns. It keeps all tensors alive that kernels are working on."""

    def __init__(
        self,
        ticket: _core.Ticket | None,
        touched: Sequence[tuple[Part, Gradients]],
        stream: Callable[[], None] | None = None,
        updated: Callable[[Iterable[Tensor]], None] = lambda _: None,
    ) -> None:
        """``stream`` updates what is on NVMe, in the thread that waits; ``updated`` hears of all that was."""
        self._ticket, self._touched, self._stream, self._updated = ticket, touched, stream, updated
        self._beside: Future[None] | None = None
        self.failed: Callable[[BaseException], None] = lambda _: None  # hears of an error in wait()

    def stream_beside(self, start: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Let ``stream`` run beside the caller, where ``start`` begins it; :meth:`wait` then waits for it."""
        if self._stream is not None:
            self._beside = start(self._stream)
            self._stream = self._beside.result

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        streamed = self._stream is None or (self._beside is not None and self._beside.done())
        return streamed and (self._ticket is None or self._ticket.done())

    def wait(self) -> None:
        """Return once everything is updated. A second call does nothing.

        Raises:
            StorageError: a transfer failed, and a part of the states on NVMe is updated.
        """
        ticket, self._ticket = self._ticket, None
        touched, self._touched = self._touched, ()
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
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
