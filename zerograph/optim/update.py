"""An update that is under way."""

from __future__ import annotations

from collections.abc import Sequence

from zerograph import _core
from zerograph.optim.parts import Part
from zerograph.optim.tensors import Gradients


class PendingUpdate:
    """What :meth:`HostOptimizer.start_step` returns. It keeps all tensors alive that kernels are working on."""

    def __init__(self, ticket: _core.Ticket | None, touched: Sequence[tuple[Part, Gradients]]) -> None:
        self._ticket, self._touched = ticket, touched

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._ticket is None or self._ticket.done()

    def wait(self) -> None:
        """Return once everything is updated. A second call does nothing."""
        ticket, self._ticket = self._ticket, None
        touched, self._touched = self._touched, ()
        if ticket is not None:
            ticket.wait()
        for part, grads in touched:
            part.updated(grads)

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None:
            ticket.wait()  # before the tensors go
