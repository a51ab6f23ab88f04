"""Batch and sequence in the sizes of a graph that was traced with dynamic shapes.

Torch gives every dynamic dimension of every input a symbol of its own, and notes what it assumed about them. Here its
expressions become those of :mod:`zerograph.symbolic`, in ``batch`` and ``seq``, and its notes become conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from zerograph.core.errors import UnsupportedError
from zerograph.graph.costs import expression_of
from zerograph.graph.nodes import is_view
from zerograph.symbolic import Condition, Name, symbols

aten = torch.ops.aten
_KEEP_INDICES = frozenset({aten.clone.default, torch.ops.prims.convert_element_type.default, aten._to_copy.default})

_FLOORDIV, _CEILDIV, _MOD = (sympy.Function(name, integer=True) for name in ("floordiv", "ceildiv", "mod"))
_PLAIN: Mapping[str, Any] = {
    "FloorDiv": _FLOORDIV,
    "CleanDiv": _FLOORDIV,
    "CeilDiv": _CEILDIV,
    "Mod": _MOD,
    "PythonMod": _MOD,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "PowByNatural": sympy.Pow,
    "Identity": lambda x: x,
}
"""Torch's own functions of whole numbers, by exact ones that need no torch."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What tracing notes about its symbols.

    Attributes:
        sizes: of each symbol the size that was traced.
        meant: of each symbol what it turned out to be: itself, another one, or a number.
        ranges: least and largest size of each symbol that the trace is for.
        guards: what it assumed besides, with the user's ``file:line``.
    """

    sizes: Mapping[Any, int]
    meant: Mapping[Any, Any]
    ranges: Mapping[Any, tuple[Any, Any]]
    guards: tuple[tuple[Any, str], ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table that are read by position: up to index ``last``, of ``rows``, by the user's ``file:line``."""

    last: Any
    rows: int
    source: str


class Dimensions:
    """What the sizes of one graph say about batch and sequence.

    Attributes:
        fixed: why a dimension that was marked dynamic is not, by name: tracing needed its very size.
    """

    def __init__(self, traced: Traced, sizes: Mapping[Name, int]) -> None:
        self._traced = traced
        self._plain: dict[Any, Any] = {}
        self._names = {size: name for name, size in sizes.items()}
        self._symbols = symbols()
        self.fixed: dict[Name, str] = {}
        self._rename = self._renamed()

    def read(self, size: int | torch.SymInt) -> Any:
        """``size`` as a number, or as an expression in batch and sequence; a data-dependent size counts as 0.

        Raises:
            UnsupportedError: it is no arithmetic on whole numbers.
        """
        return size if isinstance(size, int) else self._converted(expression_of(size))

    def decided(self, truth: Any) -> Any:
        """A comparison of sizes as True or False where it does not depend on them."""
        if isinstance(truth, bool):
            return truth
        return bool(truth) if truth in (sympy.true, sympy.false) else truth

    def conditions(self, lookups: Iterable[Lookup]) -> tuple[Condition, ...]:
        """What has to be true of batch and sequence for the graph to be the traced one; each once."""
        found = (*self._guards(), *self._ranges(), *map(self._limit, lookups))  # of equal ones the first: it has a line
        return tuple({c.holds: c for c in reversed(found) if self.decided(c.holds) is not True}.values())[::-1]

    def _renamed(self) -> dict[Any, Any]:
        """Every symbol as ``batch`` or ``seq``, or as the number that tracing took it for."""
        found = {}
        for symbol, size in self._traced.sizes.items():
            name, meant = self._names.get(size), self._traced.meant[symbol]
            if meant.is_Integer:
                found[symbol] = meant
                if name is not None:
                    self.fixed[name] = f"the model computes with exactly {meant}{self._reason(symbol)}"
            elif name is not None:
                found[symbol] = self._symbols[name]
        return found

    def _reason(self, symbol: Any) -> str:
        asked = (source for guard, source in self._traced.guards if isinstance(guard, sympy.Eq) and guard.has(symbol))
        source = next(asked, "")
        return f" ({source})" if source else ""

    def _ranges(self) -> Iterator[Condition]:
        for symbol, (least, most) in self._traced.ranges.items():
            size = self._rename.get(symbol)
            if size is not None and size.is_Symbol:
                yield Condition(sympy.Ge(size, least))  # tracing takes 0 and 1 for constants
                if most.is_Integer:
                    yield Condition(sympy.Le(size, most))

    def _guards(self) -> Iterator[Condition]:
        for guard, source in self._traced.guards:
            if not free_unbacked_symbols(guard):
                yield Condition(self._converted(guard), source)

    def _limit(self, lookup: Lookup) -> Condition:
        """A table needs a row for every position, which is nothing that tracing asks for."""
        return Condition(sympy.Lt(self._converted(lookup.last), lookup.rows), lookup.source, limit=True)

    def _converted(self, expression: Any) -> Any:
        if expression not in self._plain:
            self._plain[expression] = self._convert(expression)
        return self._plain[expression]

    def _convert(self, expression: Any) -> Any:
        if expression.is_Symbol:
            if free_unbacked_symbols(expression):
                return sympy.Integer(0)
            if expression in self._rename:
                return self._rename[expression]
            raise UnsupportedError(f"a size depends on {expression}, which is neither batch nor sequence")
        if not expression.args:
            return expression
        kind = _PLAIN.get(expression.func.__name__)
        if kind is None and expression.func.__module__.startswith("torch."):
            raise UnsupportedError(f"the size {expression} is no arithmetic on whole numbers")
        return (kind or expression.func)(*map(self._converted, expression.args))


def last_of_range(index: Any) -> Any:
    """The largest of the indices 0, 1, 2, ..., maybe shifted, in torch's symbols; None where they are others."""
    shift = 0
    while isinstance(index, fx.Node):
        if index.target is torch.ops.prims.iota.default:
            length, start, step = index.args[0], index.kwargs["start"], index.kwargs["step"]
            if not isinstance(step, int) or step <= 0:
                return None
            return shift + _size(start) + _size(step) * (_size(length) - 1)
        if index.target is aten.add.Tensor and not index.kwargs and isinstance(index.args[1], int):
            shift += index.args[1]
        elif index.target not in _KEEP_INDICES and not (is_view(index) and _keeps_all(index)):
            return None
        index = index.args[0]
    return None


def _keeps_all(view: fx.Node) -> bool:
    """Whether ``view`` looks at everything, once or more often; sizes are compared as expressions, and not asked."""
    source: Any = view.args[0]
    before, after = (sympy.prod(map(_size, node.meta["val"].shape)) for node in (source, view))
    return view.target is aten.expand.default or before == after


def _size(argument: Any) -> Any:
    """A size among a node's arguments as sympy's."""
    return expression_of(argument.meta["val"] if isinstance(argument, fx.Node) else argument)
