"""The step of a model at any batch or sequence, traced at a few of them.

Between traces and beyond them the numbers of a step are interpolated. That is exact while the model does the same
operations at every size, so an answer is traced before anyone relies on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zerograph.core.errors import SizeError, UnsupportedError
from zerograph.core.step import Dimension, Step
from zerograph.dryrun.compile_only import Compiled, compile_only, on_meta
from zerograph.dryrun.inputs import arguments, sizes_of
from zerograph.planner.profile.interpolate import MOST_POINTS, POINTS, interpolated, outline

log = logging.getLogger(__name__)

MOST_TRACES = 40
FARTHEST = 16
"""How much farther than from each other traces may be from a size that they tell: sizes are rounded here and there."""


class Steps:
    """A model's training step by the size of one dimension, everything else as given.

    Attributes:
        what: the dimension.
        start: the size that was traced first.
        states: bytes on the device between steps, per rank.
        tokens: of one rank, by the size that was traced.
    """

    def __init__(self, make: Callable[[], Any], what: Dimension, *, world: int, batch: int, seq: int, **options: Any):
        """
        Args:
            make: see :func:`zerograph.dryrun.compile_only.compile_only`; likewise ``batch``, ``seq`` and ``options``.
            world: ranks.

        Raises:
            UnsupportedError: the model does not train, cannot be traced whole, or has no such dimension.
        """
        self._make, self.what = make, what
        self._options = {"world_size": world, "batch": batch, "seq": seq, **options}
        self.tokens: dict[int, int] = {}
        self._known: dict[int, Step] = {}
        self._outlines: dict[int, object] = {}  # of those; steps with equal ones are interpolated
        self._failed: dict[int, str] = {}
        self._end: int | None = None  # the smallest size that is too large for the model
        self._traces = 0
        came = sizes_of(arguments(on_meta(make)[1], batch, seq, {}))
        self.start = max(2, came.get(what, 0))  # tracing takes 1 for a constant
        self._trace(self.start)

    def at(self, size: int) -> Step:
        """The step at ``size``: as it was traced there, or as the traces nearest to it tell.

        Raises:
            SizeError: the model cannot be run at that size.
            UnsupportedError: what it computes depends on the size in too many ways.
        """
        step = self._known.get(size) or self._interpolated(size)
        if step is None and size not in self._failed:
            self.confirm(size)
            step = self._known.get(size)
        if size in self._failed or (self._end is not None and size >= self._end):
            raise SizeError(self._failed[size if size in self._failed else self._end])  # type: ignore[index]
        assert step is not None, "it runs, and was traced"
        for lookup in step.lookups:
            if lookup.last >= lookup.rows:
                where = f" ({lookup.source})" if lookup.source else ""
                raise SizeError(f"at {self.what} {size} row {lookup.last} is read of a table of {lookup.rows}{where}")
        return step

    def confirm(self, size: int) -> bool:
        """Trace at ``size``, unless that was done; returns whether :meth:`at` was right there. From now on it is.

        Raises:
            UnsupportedError: the model runs at one size only, or depends on it in too many ways.
        """
        if size in self._known or size in self._failed or (self._end is not None and size >= self._end):
            return True
        guess = self._interpolated(size)
        if self._runs(size):
            return guess == self._known[size]
        if size > self.start:
            self._find_end(size)
        return False

    def learn(self, size: int, compiled: Compiled) -> None:
        """Take the step of ``compiled`` for the one at ``size``."""
        frame = compiled.frame
        self._known[size], self._outlines[size] = frame.step, outline(frame.step)
        self.states, self.tokens[size], self.unit = compiled.states, compiled.tokens, compiled.unit

    def _interpolated(self, size: int) -> Step | None:
        """The step at ``size`` by the traces nearest to it; None where too few of these do the same operations."""
        near = sorted(self._known, key=lambda n: (abs(n - size), n))
        chosen: list[int] = []
        for n in near:
            distance = min((abs(n - other) for other in chosen), default=n)
            if self._outlines[n] == self._outlines[near[0]] and FARTHEST * distance >= abs(n - size):
                chosen.append(n)
        if size == 1 or len(chosen) < POINTS[self.what]:
            return None
        return interpolated({n: self._known[n] for n in chosen[:MOST_POINTS]}, size)

    def _find_end(self, high: int) -> None:
        """Narrow down where the model ends, which does not run at ``high``.

        It may run at multiples of something only, such as windows of a sequence: those of :attr:`start` are tried
        first, then those of its divisors.
        """
        if len(self._known) == 1 and not any(map(self._runs, (2 * self.start, self.start // 2))):
            raise UnsupportedError(
                f"there is nothing to solve for: {self.what} is fixed, the model runs at {self.start} only; "
                f"{self._failed[2 * self.start]}"
            )
        low, unit = max(n for n in self._known if n < high), self.start
        while high - low > 1:
            # A multiple of the unit, and one at least above what runs.
            middle = max((low + high) // 2 // unit * unit, (low // unit + 1) * unit)
            if middle >= high:
                unit //= min(n for n in range(2, unit + 1) if unit % n == 0)
            elif self._runs(middle):
                low = middle
            else:
                high = middle
        self._end = high

    def _runs(self, size: int) -> bool:
        """Trace at ``size``; returns whether the model runs there."""
        if size in self._known or size in self._failed:
            return size in self._known
        if self._traces == MOST_TRACES:
            raise UnsupportedError(
                f"the model's code depends on {self.what} in too many ways: {MOST_TRACES} traces do not tell how",
                "plan single sizes",
            )
        try:
            with _quiet():
                self._trace(size)
        except UnsupportedError as error:
            self._failed[size] = f"at {self.what} {size} {str(error).partition(chr(10))[0]}"
        return size in self._known

    def _trace(self, size: int) -> None:
        self._traces += 1
        self.learn(size, compile_only(self._make, sizes={self.what: size}, programs=False, **self._options))


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback where a size does not work out; here that is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
