"""What commands write: tables on stdout, progress on stderr. Rich on a terminal, plain lines anywhere else.

Rich itself respects ``NO_COLOR`` and the width of the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

Cell = str | tuple[str, str]
"""Text, or text and the style it has on a terminal."""


def show_table(rows: Sequence[Sequence[Cell]]) -> None:
    """Write ``rows``, all of one length, to stdout as aligned columns."""
    if not sys.stdout.isatty():
        for line in plain_lines(rows):
            click.echo(line)
        return
    from rich.console import Console

    Console(highlight=False).print(_grid(rows))


def plain_lines(rows: Sequence[Sequence[Cell]]) -> list[str]:
    """The rows as lines of aligned columns, as wide as it takes."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _grid(rows: Sequence[Sequence[Cell]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for last in [False] * (len(rows[0]) - 1) + [True]:
        grid.add_column(no_wrap=not last, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    return grid


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function to call with what is being done now: a spinner on a terminal, else a line for each call."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(f"{text} ...", err=True)
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("starting") as status:
        yield status.update
