"""The step of a model at any batch or sequence, traced as seldom as it can be: mostly once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zerograph.dryrun import Captured, compile_only
from zerograph.errors import SizeError, UnsupportedError
from zerograph.ir import Step
from zerograph.symbolic import Name, SymbolicStep
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
        self._ones: dict[int, Step] = {}
        step = self._trace(None)
        if not step.traced.training:
            raise UnsupportedError(
                "the model has no backward: none of its outputs depends on a trainable parameter",
                "return the loss or the logits from forward",
            )
        if what in step.fixed:
            raise UnsupportedError(f"there is nothing to solve for: {what} is fixed, {step.fixed[what]}")
        self.start = step.sizes[what]

    def at(self, size: int) -> Step:
        """The step at ``size``.

        Raises:
            SizeError: there is no such step: the model cannot be run at that size.
            UnsupportedError: tracing went too many ways.
        """
        if size == 1:
            return self._at_one()
        for step in self._traced:
            wrong = step.broken({self.what: size})
            if wrong is None:
                return step.at(**{self.what: size})
            if wrong.limit:
                raise SizeError(f"the model's own limit is {wrong}")
        log.info("traced again at %s %d, as %s is not so there", self.what, size, wrong)
        self._again(size)
        return self.at(size)

    def _again(self, size: int) -> None:
        if len(self._traced) == MOST_TRACES:
            raise UnsupportedError(
                f"what the model computes depends on {self.what} in more than {MOST_TRACES} ways",
                "plan single sizes",
            )
        try:
            step = self._trace(size)
        except UnsupportedError as error:
            reason = str(error).partition("\n\n")[0]
            raise SizeError(f"at {self.what} {size} {reason}") from error
        if self.what in step.fixed:
            raise SizeError(f"at {self.what} {size} {step.fixed[self.what]}")

    def _at_one(self) -> Step:
        if 1 not in self._ones:
            try:
                self._ones[1] = _captured(self._make, Vary({self.what: 1}, open=()), **self._options).step.traced
            except UnsupportedError as error:
                raise SizeError(f"at {self.what} 1 {str(error).partition(chr(10))[0]}") from error
        return self._ones[1]

    def _trace(self, size: int | None) -> SymbolicStep:
        sizes: dict[Name, int] = {} if size is None else {self.what: size}
        found = _captured(self._make, Vary(sizes, open=(self.what,)), **self._options)
        self.states = found.states
        self._traced.append(found.step)
        return found.step


def _captured(make: Callable[[], Any], vary: Vary, **options: Any) -> Captured:
    try:
        compile_only(make, vary=vary, **options)
    except Captured as found:
        return found
    raise AssertionError("a capture ends in compile_only, or in an error")
