"""The step of a model at any batch or sequence, traced as seldom as it can be: mostly once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zerograph.core.errors import SizeError, UnsupportedError
from zerograph.core.step import Step
from zerograph.dryrun.compile_only import Captured, compile_only
from zerograph.symbolic import Condition, Name, SymbolicStep
from zerograph.vary import Vary

log = logging.getLogger(__name__)

MOST_TRACES = 6


class Steps:
    """A model's training step by the size of one dimension, everything else as given.

    A trace holds where what it assumed holds. At sizes where that is not so, and at 1, which tracing takes for a
    constant, the model is traced again.

    Attributes:
        what: the dimension.
        start: the size that was traced first.
        states: bytes on the device between steps, per rank.
    """

    def __init__(self, make: Callable[[], Any], what: Name, *, world: int, batch: int, seq: int, **options: Any):
        """
        Args:
            make: see :func:`zerograph.dryrun.compile_only`; likewise ``batch``, ``seq`` and ``options``.
            world: ranks.

        Raises:
            UnsupportedError: the model does not train, cannot be traced whole, or works at this one size only.
        """
        self._make, self.what = make, what
        self._options = {"world_size": world, "batch": batch, "seq": seq, **options}
        self._traced: list[SymbolicStep] = []
        self._alone: dict[int, Step] = {}  # at sizes that the model has code of their own for
        self._impossible: dict[Condition, str] = {}
        self._failed: dict[int, str] = {}
        self._count = 0  # of traces that worked
        self._one: Step | None = None
        step = self._trace(None)
        if not step.traced.training:
            raise UnsupportedError(
                "the model has no backward: none of its outputs depends on a trainable parameter",
                "return the loss or the logits from forward",
            )
        if what in step.fixed:
            raise UnsupportedError(f"there is nothing to solve for: {what} is fixed, {step.fixed[what]}")
        self._traced.append(step)
        self.start = step.sizes[what]

    def at(self, size: int) -> Step:
        """The step at ``size``.

        Raises:
            SizeError: there is no such step: the model cannot be run at that size.
            UnsupportedError: tracing went too many ways.
        """
        if size == 1:
            return self._at_one()
        if size in self._alone:
            return self._alone[size]
        broken = []
        for step in self._traced:
            wrong = step.all_broken({self.what: size})
            if not wrong:
                return step.at(**{self.what: size})
            broken.append(wrong)
        for condition in (c for wrong in broken for c in wrong):
            if condition.limit or condition in self._impossible:
                raise SizeError(self._impossible.get(condition, f"the model's own limit is {condition}"))
        return self._again(size, broken[0])

    def _again(self, size: int, wrong: Sequence[Condition]) -> Step:
        """Trace at ``size``, where nothing of ``wrong`` is so. If that fails it would fail wherever that is not so.

        This is known of one condition; of several it is not known which one the model needs.
        """
        if size in self._failed:
            raise SizeError(self._failed[size])
        log.info("traced again at %s %d, where %s is not so", self.what, size, wrong[0])
        if self._count == MOST_TRACES:
            raise UnsupportedError(
                f"what the model computes depends on {self.what} in more than {MOST_TRACES} ways",
                "plan single sizes",
            )
        try:
            with _quiet():
                step = self._trace(size)
        except UnsupportedError as error:
            reason = str(error).partition("\n\n")[0]
            self._failed[size] = f"the model needs {wrong[0]}; at {self.what} {size} {reason}"
            if len(wrong) == 1:
                self._impossible[wrong[0]] = self._failed[size]
            raise SizeError(self._failed[size]) from error
        if self.what in step.fixed:  # code for this very size: its trace says nothing of others
            self._alone[size] = step.traced
            return step.traced
        self._traced.append(step)
        return step.at(**{self.what: size})

    def _at_one(self) -> Step:
        if self._one is None:
            try:
                with _quiet():
                    self._one = _captured(self._make, Vary({self.what: 1}, open=()), **self._options).step.traced
            except UnsupportedError as error:
                raise SizeError(f"at {self.what} 1 {str(error).partition(chr(10))[0]}") from error
        return self._one

    def _trace(self, size: int | None) -> SymbolicStep:
        sizes: dict[Name, int] = {} if size is None else {self.what: size}
        found = _captured(self._make, Vary(sizes, open=(self.what,)), **self._options)
        self.states, self._count = found.states, self._count + 1
        return found.step


def _captured(make: Callable[[], Any], vary: Vary, **options: Any) -> Captured:
    try:
        compile_only(make, vary=vary, **options)
    except Captured as found:
        return found
    raise AssertionError("a capture ends in compile_only, or in an error")


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
