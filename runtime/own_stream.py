"""The stream of an accelerator in which collectives of one process group run, one after the other.

torch runs a collective that the caller waits for (``async_op=False``) in the current stream, and keeps neither its
tensors nor an object that stands for it: order, priority and lives of memory are then ours. A process group's own
stream would wait for all that the caller's stream was told, copies included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

Wait = Callable[[], None]
"""Lets the current stream wait for a copy."""


class OwnStream:
    """Collectives before what computes, where both are ready: everything behind them waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.Stream:
        return torch.Stream(device=self._device, priority=-1)

    @contextlib.contextmanager
    def behind(self, waits: Sequence[Wait] = ()) -> Iterator[None]:
        """What is told inside begins once the current stream has come to here, and behind these ``waits``.

        Where that raises, the current stream waits for what was told: nobody keeps its memory.
        """
        current = torch.accelerator.current_stream(self._device)
        before = current.record_event()
        try:
            with self._stream:
                self._stream.wait_event(before)
                for wait in waits:
                    wait()
                yield
        except BaseException:
            current.wait_event(self.end())
            raise

    def end(self) -> torch.Event:
        """The end of all that it was told so far."""
        return self._stream.record_event()
