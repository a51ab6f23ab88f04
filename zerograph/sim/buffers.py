"""The buffers that gathered buckets take turns in, between the ranks of a CPU. No torch.

Which one a bucket gets, and when a free one goes, is the same rule for the runtime's pool and for forecasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zerograph.core.timeline import Stream


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

    def __iter__(self) -> Iterator[B]:
        yield from self._passed
        yield from self._fresh

    def add(self, buffer: B) -> None:
        """Nothing reads ``buffer`` any more."""
        self._fresh.append(buffer)

    def take(self, size: int) -> tuple[B | None, Sequence[B]]:
        """The buffer for ``size`` bytes, None where it has to be made, and those that go before it is."""
        fresh, passed, chosen = self._fresh, self._passed, None
        if not (fresh or passed):
            return None, ()
        most = size + size // 4  # a small bucket must not hold a large one's memory
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


@dataclass(slots=True, eq=False)
class _Buffer:
    """A simulated one: what ``gather`` brings, or brought last, is in it or it is free, from behind ``since`` on."""

    nbytes: int
    gather: int
    since: int


class GatherBuffers:
    """The buffers of a simulated step; moments are tasks behind whose end something happens.

    Attributes:
        coming: by gather that nobody has waited for, its bytes.
    """

    def __init__(
        self, streams: Sequence[Stream], tell: Callable[[int, int, int, int, bool], None], *, beside: bool = False
    ) -> None:
        """
        Args:
            streams: of the tasks so far.
            tell: hears of all memory that is held: its bytes, the gather, the first and the last task that find it (-1
                where it stays), and whether it is free.
            beside: whether collectives run beside compute, over a network.
        """
        self.coming: dict[int, int] = {}
        self._streams, self._tell = streams, tell
        self._in_turn = _COMPUTE if beside else _IN_TURN
        self._taken: dict[tuple[int, int], _Buffer] = {}  # by bucket and tile
        self._free = FreeBuffers[_Buffer]()

    def take(self, part: tuple[int, int], gather: int, now: int) -> None:
        """Give the bucket that ``gather`` brings its buffer, as it is waited for."""
        size = self.coming.pop(gather)
        buffer, gone = self._free.take(size)
        for other in gone:
            self._hold(other, now, True)
        if buffer is None:
            buffer = _Buffer(size, gather, now)
        else:
            self._hold(buffer, now, True)
            buffer.gather = gather
        self._taken[part] = buffer

    def give(self, part: tuple[int, int], now: int) -> bool:
        """A bucket or tile is let go of; whether it had a buffer."""
        buffer = self._taken.pop(part, None)
        if buffer is None:
            return False
        self._hold(buffer, now, False)
        self._free.add(buffer)
        return True

    def trim(self, now: int) -> None:
        """All that are free go."""
        for buffer in self._free.clear():
            self._hold(buffer, now, True)

    def finish(self) -> None:
        """Hold every taken buffer to the end."""
        end = len(self._streams)
        for buffer in self._taken.values():
            self._hold(buffer, end, False)
        self.trim(end)

    def _hold(self, buffer: _Buffer, now: int, free: bool) -> None:
        """``buffer`` was its bucket's, or ``free``, until now."""
        first, streams, tasks = buffer.since + 1, self._streams, len(self._streams)
        buffer.since = now
        # Others may begin late; the next compute waits for all that are in turn.
        while first < tasks and first <= now and streams[first] not in self._in_turn:
            first += 1
        # What is between two tasks only is as if it were not.
        if first < tasks and first <= now:
            self._tell(buffer.nbytes, buffer.gather, first, now if now < tasks else -1, free)


_IN_TURN = frozenset(("compute", "gather", "reduce"))
"""Streams that do not overlap where buffers are used again, but for collectives between hosts."""
_COMPUTE = frozenset(("compute",))
