"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zerograph.core.units import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


class Parsed(click.ParamType):
    """An option that ``parse`` reads; what it raises becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if size == 0:
        raise ValueError("there must be some memory")
    return size


SIZE = Parsed("size", _memory)
"""Bytes of a memory, such as 70GiB."""


def folder(text: str) -> Callable[[F], F]:
    """``--path DIR``: a folder that exists; the current one unless given."""
    kind = click.Path(exists=True, file_okay=False, path_type=Path)
    return click.option("--path", type=kind, default=Path(), show_default="the current one", metavar="DIR", help=text)


as_json = click.option("--json", "json_", is_flag=True, help="Write JSON to stdout (schema: docs/guide/json.md).")
plan_argument = click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PLAN")
"""A file that ``zerograph plan -o`` wrote."""
