"""Lists of dataclasses as tables for JSON: column by column, which is half as long as object by object."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from zerograph.core.units import is_number

_NUMBERS = {"int": int, "float": int | float, "tuple[int, ...]": int}
"""Types of fields that hold numbers, or tuples of some, by their annotation."""


def table(cls: Any, items: Iterable[Any]) -> dict[str, Any]:
    """``items``, all of the dataclass ``cls``, by field."""
    found = list(items)
    return {f.name: _packed([getattr(item, f.name) for item in found]) for f in fields(cls)}


def from_table(cls: Any, columns: dict[str, Any]) -> tuple[Any, ...]:
    """The rows of :func:`table`; lists became tuples. A column may be missing where its field has a default.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the columns are not those of ``cls``, or of different lengths.
    """
    # A column without a default that is missing raises KeyError below, which callers tell as an incomplete file.
    known = [f.name for f in fields(cls) if f.name in columns or f.default is MISSING]
    values = ([tuple(v) if isinstance(v, list) else v for v in unpacked(columns[name])] for name in known)
    found = dict(zip(known, values, strict=True))
    for f in fields(cls):
        if f.type in _NUMBERS:
            _require_numbers(f"{f.name} of {cls.__name__}", found.get(f.name, ()), f.type)
    return tuple(cls(**dict(zip(found, row, strict=True))) for row in zip(*found.values(), strict=True))


def _require_numbers(name: str, column: Iterable[Any], kind: str) -> None:
    """Refuse what a text editor puts where numbers belong, before sums and comparisons meet it."""
    for value in column:
        for number in value if kind.startswith("tuple") else (value,):
            if not is_number(number, _NUMBERS[kind]):
                raise ValueError(f"{name} holds {number!r}")


def mixed_table(items: Iterable[Any]) -> dict[str, Any]:
    """``items`` of several dataclasses: a table for each class, and the class of each item in order."""
    by_class: dict[str, list[Any]] = defaultdict(list)
    order = []
    for item in items:
        order.append(type(item).__name__)
        by_class[order[-1]].append(item)
    return {"order": _packed(order), **{name: table(type(same[0]), same) for name, same in by_class.items()}}


def from_mixed_table(classes: Iterable[Any], tables: dict[str, Any]) -> tuple[Any, ...]:
    """The rows that :func:`mixed_table` was given, all of some of ``classes``.

    Raises:
        KeyError, IndexError, TypeError, ValueError: as :func:`from_table`, or tables and order differ.
    """
    known = {cls.__name__: cls for cls in classes}
    left = {name: [*reversed(from_table(known[name], tables[name]))] for name in tables if name != "order"}
    return tuple(left[name].pop() for name in unpacked(tables["order"]))


def _packed(column: list[Any]) -> Any:
    """``column``, or its distinct texts and the place of each row's among them where most repeat: a deep model's
    modules and source lines are half of its file otherwise."""
    # Numbers are shorter than an index into distinct ones.
    if not all(isinstance(value, str) for value in column):
        return column
    places = {text: place for place, text in enumerate(dict.fromkeys(column))}
    if 2 * len(places) > len(column):
        return column
    return {"of": list(places), "at": [places[text] for text in column]}


def unpacked(column: Any) -> list[Any]:
    """The values of one column of a :func:`table`."""
    return [column["of"][at] for at in column["at"]] if isinstance(column, dict) else column
