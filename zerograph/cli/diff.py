"""``zerograph diff``: what differs between two plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from zerograph.cli.options import as_json
from zerograph.cli.terminal import Cell, show_table
from zerograph.cli.view.differences import Difference, differences
from zerograph.core.files.reading import read_plan

VERSION = 1
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("a", type=_FILE, metavar="A")
@click.argument("b", type=_FILE, metavar="B")
@as_json
def diff(a: Path, b: Path, json_: bool) -> int:
    """List the differences between two plans.

    Decisions first, then peaks and seconds, and by name the parts that follow from them. Exits with 1 if anything
    differs.
    """
    found = differences(read_plan(a), read_plan(b))
    if json_:
        click.echo(json.dumps(to_data(found), indent=2))
    elif found:
        show_table(rows(found, *((a.name, b.name) if a.name != b.name else (str(a), str(b)))))
    return int(bool(found))


def to_data(found: Sequence[Difference]) -> dict[str, Any]:
    """The data that ``--json`` writes; docs/guide/json.md has the schema."""
    return {"version": VERSION, "equal": not found, "differences": [asdict(d) for d in found]}


def rows(found: Sequence[Difference], a: str, b: str) -> list[list[Cell]]:
    """A row for each difference under the names of the files; the part is said once."""
    table: list[list[Cell]] = [["", "", (a, "bold red"), (b, "bold green"), ""]]
    part = ""
    for d in found:
        table.append([("" if d.part == part else d.part, "bold"), d.title, d.text(d.a), d.text(d.b), _change(d)])
        part = d.part
    return table


def _change(d: Difference) -> str:
    """By how much bytes and seconds change."""
    if d.part not in ("peaks", "seconds") or not d.a or d.b is None:
        return ""
    return f"x{float(d.b) / float(d.a):.3g}"
