"""The output of commands: tables on stdout, progress on stderr. Rich on a terminal, plain lines anywhere else.

Rich itself respects ``NO_COLOR`` and the width of the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

Cell = str | tuple[str, str]
"""Text, or text and the style it has on a terminal."""


def show_table(
    rows: Sequence[Sequence[Cell]],
    numbers: Container[int] = (),
    below: Container[int] = (),
    named: Container[int] = (),
) -> None:
    """Write ``rows``, all of one length, to stdout as aligned columns.

    Columns in ``numbers`` are aligned to the right. Where a table is wider than the terminal, the columns in ``below``
    stand under their rows, those in ``named`` after their titles; the first row is a header then.
    """
    lines = plain_lines(rows, numbers)
    if not sys.stdout.isatty():
        for line in lines:
            click.echo(line)
        return
    if below and max(map(len, lines)) > width():
        show_lines(_stacked(rows, numbers, below, named))
        return
    from rich.console import Console

    Console(highlight=False).print(_grid(rows, numbers))


def show_lines(lines: Iterable[Cell]) -> None:
    """Write ``lines`` to stdout as they are, however long."""
    if not sys.stdout.isatty():
        for line in lines:
            click.echo(_text(line))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text(line) if isinstance(line, str) else Text(*line), soft_wrap=True)


def drawable(characters: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def width() -> int:
    """Columns of the terminal; 120 where stdout is none."""
    if not sys.stdout.isatty():
        return 120
    from shutil import get_terminal_size  # brings compression libraries, which a plain run does without

    return get_terminal_size().columns


def plain_lines(rows: Sequence[Sequence[Cell]], numbers: Container[int] = ()) -> list[str]:
    """The rows as lines of aligned columns, as wide as it takes."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(_pad(text, widths, i, numbers) for i, text in enumerate(row)).rstrip() for row in texts]


def _stacked(
    rows: Sequence[Sequence[Cell]], numbers: Container[int], below: Container[int], named: Container[int]
) -> Iterator[Cell]:
    from textwrap import wrap

    titles = [f"{_text(title)} " if i in named else "" for i, title in enumerate(rows[0])]
    beside = [i for i in range(len(rows[0])) if i not in below]
    lines = plain_lines([[row[i] for i in beside] for row in rows], [at for at, i in enumerate(beside) if i in numbers])
    yield lines[0], "bold"
    for line, row in zip(lines[1:], rows[1:], strict=True):
        yield line, row[0][1] if isinstance(row[0], tuple) else ""
        notes = [
            titles[i] + text for i, cell in enumerate(row) if i in below and (text := _text(cell)) not in ("", "-")
        ]
        for part in wrap(", ".join(notes), max(width() - 2, 20), break_long_words=False, break_on_hyphens=False):
            yield f"  {part}", "dim"


def _pad(text: str, widths: Sequence[int], column: int, numbers: Container[int]) -> str:
    return text.rjust(widths[column]) if column in numbers else text.ljust(widths[column])


def _grid(rows: Sequence[Sequence[Cell]], numbers: Container[int]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for column in range(len(rows[0])):
        justify: JustifyMethod = "right" if column in numbers else "left"
        grid.add_column(no_wrap=column in numbers, overflow="fold", justify=justify)
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
