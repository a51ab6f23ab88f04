"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def folder(text: str) -> Callable[[F], F]:
    """``--path DIR``: a folder that exists; the current one unless given."""
    kind = click.Path(exists=True, file_okay=False, path_type=Path)
    return click.option("--path", type=kind, default=Path(), show_default="the current one", metavar="DIR", help=text)


as_json = click.option("--json", "json_", is_flag=True, help="Write JSON to stdout (docs/cli.md has its schema).")
