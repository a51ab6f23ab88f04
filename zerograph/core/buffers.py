"""Which buffer a gathered bucket gets where buffers are used again: by the runtime, and in forecasts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Memory of a size."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""


B = TypeVar("B", bound=Sized)


class FreeBuffers(Generic[B]):
    """The buffers of a pool that nothing reads.

    One that the next bucket does not choose stays for one more time, as buckets may take turns in size, and then goes:
    an embedding's would wait for the next step.
    """

    def __init__(self) -> None:
        self._fresh: list[B] = []  # free since the last time that one was chosen
        self._passed: list[B] = []  # those that were free then, and not chosen

    def __len__(self) -> int:
        return len(self._fresh) + len(self._passed)

    def add(self, buffer: B) -> None:
        """Nothing reads ``buffer`` any more."""
        self._fresh.append(buffer)

    def take(self, size: int) -> tuple[B | None, Sequence[B]]:
        """The buffer for ``size`` bytes, None where it has to be made, and those that go before it is."""
        # A quarter larger at most: a small bucket must not hold a large one's memory.
        most, chosen, fresh, passed = size + size // 4, None, self._fresh, self._passed
        for buffer in (*passed, *fresh):
            if size <= buffer.nbytes <= most and (chosen is None or buffer.nbytes < chosen.nbytes):
                chosen = buffer
        self._fresh, self._passed = [], [buffer for buffer in fresh if buffer is not chosen]
        return chosen, [buffer for buffer in passed if buffer is not chosen]

    def clear(self) -> Sequence[B]:
        """All that were free."""
        gone = [*self._passed, *self._fresh]
        self._fresh, self._passed = [], []
        return gone
