"""Lists of dataclasses as tables for JSON: column by column, which is half as long as object by object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any


def table(cls: Any, items: Iterable[Any]) -> dict[str, Any]:
    """``items``, all of the dataclass ``cls``, by field."""
    found = list(items)
    return {f.name: _packed([getattr(item, f.name) for item in found]) for f in fields(cls)}


def rows(cls: Any, columns: dict[str, Any]) -> tuple[Any, ...]:
    """What :func:`table` was given; lists became tuples.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the columns are not those of ``cls``, or of different lengths.
    """
    unpacked = ([tuple(v) if isinstance(v, list) else v for v in _unpacked(columns[f.name])] for f in fields(cls))
    return tuple(cls(*values) for values in zip(*unpacked, strict=True))


def _packed(column: list[Any]) -> Any:
    """``column``, or its distinct texts and the place of each row's among them where most repeat: a deep model's
    modules and source lines are half of its file otherwise."""
    if not all(isinstance(value, str) for value in column):
        return column
    places = {text: place for place, text in enumerate(dict.fromkeys(column))}
    if 2 * len(places) > len(column):
        return column
    return {"of": list(places), "at": [places[text] for text in column]}


def _unpacked(column: Any) -> list[Any]:
    return [column["of"][at] for at in column["at"]] if isinstance(column, dict) else column
