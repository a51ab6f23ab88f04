"""Lists of dataclasses as tables for JSON: column by column, which is half as long as object by object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any


def table(cls: Any, items: Iterable[Any]) -> dict[str, Any]:
    """``items``, all of the dataclass ``cls``, by field."""
    found = list(items)
    return {f.name: _packed([getattr(item, f.name) for item in found]) for f in fields(cls)}


def from_table(cls: Any, columns: dict[str, Any]) -> tuple[Any, ...]:
    """What :func:`table` was given; lists became tuples. A column may be missing where its field has a default.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the columns are not those of ``cls``, or of different lengths.
    """
    # A column without a default that is missing raises KeyError below, which callers tell as an incomplete file.
    known = [f.name for f in fields(cls) if f.name in columns or f.default is MISSING]
    values = ([tuple(v) if isinstance(v, list) else v for v in unpacked(columns[name])] for name in known)
    return tuple(cls(**dict(zip(known, row, strict=True))) for row in zip(*values, strict=True))


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
