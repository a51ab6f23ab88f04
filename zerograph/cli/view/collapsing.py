"""Names in tables: what is alike in consecutive layers is one row, ``blocks.0 .. blocks.11 (12 alike)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![\w])\d+(?![\w])")


def skeleton(name: str) -> str:
    """``name`` without the numbers that tell layers apart: ``blocks.#.mlp``; ``conv1`` keeps its own."""
    return _NUMBER.sub("#", name)


def collapse_rows(rows: Iterable[T], name: Callable[[T], str], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """Rows in their order, those in one list that follow one another, differ in numbers only and are ``alike``."""
    groups: list[list[T]] = []
    for row in rows:
        if groups and skeleton(name(groups[-1][0])) == skeleton(name(row)) and alike(groups[-1][0], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def interleaved(rows: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """Rows sorted so that those which differ in numbers only follow one another, kinds in order of appearance."""
    kinds: dict[str, list[T]] = {}
    for row in rows:
        kinds.setdefault(skeleton(name(row)), []).append(row)
    return [row for kind in kinds.values() for row in kind]


def collapsed_name(first: str, last: str, count: int) -> str:
    """The name of collapsed rows: ``gather blocks.0 .. blocks.11 (12 alike)``, with the leading words said once."""
    if count == 1:
        return first
    shared = first.rpartition(" ")[0] + " "
    return f"{first} .. {last.removeprefix(shared)} ({count} alike)"


def short_source(source: str) -> str:
    """``file:line`` for a table: of a path the file and its folder; ``--json`` has all of it."""
    return "/".join(source.split("/")[-2:])
