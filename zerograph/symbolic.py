"""A training step whose sizes are expressions in batch and sequence: traced once, it answers for every size.

Expressions are sympy's, in the symbols ``batch`` and ``seq``. :meth:`SymbolicStep.at` puts numbers in; what comes out
is an ordinary :class:`~zerograph.core.step.Step`, so that nothing after it knows symbols. No torch in here, and sympy
is imported only by what computes with expressions: it takes as long to import as the command line may take to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from zerograph.core.errors import SizeError
from zerograph.core.step import Step

if TYPE_CHECKING:
    from sympy import Basic, Expr
    from sympy.logic.boolalg import Boolean

Name = Literal["batch", "seq"]
NAMES: tuple[Name, ...] = ("batch", "seq")
Size: TypeAlias = "int | Expr"
Truth: TypeAlias = "bool | Boolean"

DIVISIONS: Mapping[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b if b else 0,
    "ceildiv": lambda a, b: -(-a // b) if b else 0,
    "mod": lambda a, b: a % b if b else 0,
}
"""What an expression may call besides arithmetic. Exact on integers, which a ``floor`` of sympy's is not once printed
as a division of floats. By zero they are 0: the condition that excludes it is computed beside those that divide."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What has to be true of batch and sequence for the step to be the traced one.

    Attributes:
        holds: the condition.
        source: the user's ``file:line`` that asks it; empty when unknown.
        limit: the model computes nothing sensible elsewhere (an index beyond its table); otherwise tracing would only
            go another way there.
    """

    holds: Truth
    source: str = ""
    limit: bool = False

    def __str__(self) -> str:
        return f"{self.holds} ({self.source})" if self.source else str(self.holds)


@dataclass(frozen=True)
class SymbolicStep:
    """One step at all sizes.

    Attributes:
        traced: the step at the sizes that were traced.
        sizes: those sizes, by name, of the dimensions that may vary.
        fixed: why the other ones may not, by name.
        bytes: of each value of ``traced``, in its order.
        flops, moved, cheap: of each of its operations.
        conditions: where all of it is true.
    """

    traced: Step
    sizes: Mapping[Name, int]
    fixed: Mapping[Name, str]
    bytes: tuple[Size, ...]
    flops: tuple[Size, ...]
    moved: tuple[Size, ...]
    cheap: tuple[Truth, ...]
    conditions: tuple[Condition, ...] = ()

    def __getstate__(self) -> dict[str, object]:
        """What it is made of: functions that are compiled when needed stay behind."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def broken(self, sizes: Mapping[Name, int]) -> Condition | None:
        """The first condition that ``sizes`` break, limits of the model before others; None where the step holds."""
        return next(iter(self.all_broken(sizes)), None)

    def all_broken(self, sizes: Mapping[Name, int]) -> list[Condition]:
        """Every condition that ``sizes`` break, limits of the model before others."""
        truths = self._conditions_at(*self._arguments(sizes))
        wrong = [c for c, holds in zip(self.conditions, truths, strict=True) if not holds]
        return sorted(wrong, key=lambda condition: not condition.limit)

    def at(self, *, batch: int | None = None, seq: int | None = None) -> Step:
        """The step at these sizes; what is left out is as it was traced.

        Raises:
            SizeError: the dimension is fixed, or the step is another one at this size.
        """
        given: dict[Name, int | None] = {"batch": batch, "seq": seq}
        sizes = {name: size for name, size in given.items() if size is not None}
        self._refuse_fixed(sizes)
        wrong = self.broken(sizes)
        if wrong is not None:
            where = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise SizeError(f"the traced step holds where {wrong}, and was asked for at {where}", "trace it there")
        numbers = self._evaluate(*self._arguments(sizes))
        size, flops, moved, cheap = (numbers.__getitem__(part) for part in self._parts)
        values = (
            v if v.bytes == new else replace(v, bytes=new) for v, new in zip(self.traced.values, size, strict=True)
        )
        ops = (
            op if (op.flops, op.moved, op.cheap) == new else replace(op, flops=new[0], moved=new[1], cheap=bool(new[2]))
            for op, new in zip(self.traced.ops, zip(flops, moved, cheap, strict=True), strict=True)
        )
        return replace(self.traced, ops=tuple(ops), values=tuple(values))

    def _refuse_fixed(self, sizes: Mapping[Name, int]) -> None:
        for name in sizes:
            if name not in self.sizes:
                why = self.fixed.get(name, "no dimension of the model's inputs is taken for it")
                raise SizeError(f"{name} is fixed: {why}", f"leave {name} out")

    def _arguments(self, sizes: Mapping[Name, int]) -> tuple[int, ...]:
        return tuple(sizes.get(name, self.sizes.get(name, 0)) for name in NAMES)

    @cached_property
    def _conditions_at(self) -> Callable[..., Sequence[int]]:
        return compiled([condition.holds for condition in self.conditions])

    @cached_property
    def _parts(self) -> tuple[slice, ...]:
        """Where values' bytes and operations' flops, moved bytes and cheapness lie among all evaluated numbers."""
        values, ops = len(self.bytes), len(self.flops)
        ends = (values, values + ops, values + 2 * ops, values + 3 * ops)
        return tuple(slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False))

    @cached_property
    def _evaluate(self) -> Callable[..., list[int]]:
        """Every size at given numbers. Deep models repeat layers: few expressions differ, and those are computed."""
        everything = (*self.bytes, *self.flops, *self.moved, *self.cheap)
        distinct = list(dict.fromkeys(everything))
        place = {expression: i for i, expression in enumerate(distinct)}
        places = [place[expression] for expression in everything]
        compute = compiled(distinct)

        def evaluate(*sizes: int) -> list[int]:
            found = compute(*sizes)
            return [found[i] for i in places]

        return evaluate


def symbols() -> dict[Name, Expr]:
    """The symbols of sizes by name."""
    from sympy import Symbol

    return {name: Symbol(name, integer=True, positive=True) for name in NAMES}


def compiled(expressions: Sequence[Basic | int | bool]) -> Callable[..., Sequence[int]]:
    """A function of batch and sequence that computes ``expressions``, exactly, on integers."""
    from sympy import lambdify

    return lambdify(list(symbols().values()), list(expressions), modules=[dict(DIVISIONS), "math"])  # type: ignore[no-any-return]
