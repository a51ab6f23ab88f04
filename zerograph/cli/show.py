"""``zerograph show``: what a plan comes to, where its memory and time go, and why."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from zerograph.cli.options import F, as_json, plan_argument
from zerograph.cli.terminal import show_lines, show_table
from zerograph.cli.view import summary
from zerograph.cli.view.groups import BYS, By, grouped, largest_rows
from zerograph.cli.view.moment import Moment, find_task, moment
from zerograph.cli.view.tables import Table, group_data, group_table, moment_data, moment_lines, moment_table
from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.reading import read_plan, read_run
from zerograph.core.files.runfile import Beside, Run

VERSION = 1

CAPTIONS: Mapping[By, str] = {
    "layer": "Bytes at the peak of each tier and time on all streams, of each where alike:",
    "kind": "Bytes at the peak of each tier:",
    "tier": "Bytes at the peak of each tier:",
    "op": "Bytes that an op takes and its time in the step, of each where alike:",
}

EXPORTS: Mapping[str, tuple[str, str, str, bool]] = {
    "html": ("html", "write", "one page that needs nothing else, for a browser.", True),
    "svg": ("svg", "write", "a picture of the streams over the memory curve.", True),
    "trace": ("trace", "write", "a trace for Perfetto or chrome://tracing.", True),
    "memory-viz": ("memory_viz", "write", "a snapshot for PyTorch's memory visualizer.", False),
    "dot": ("dot", "write_dot", "the tasks as a graph for Graphviz.", True),
    "graphml": ("dot", "write_graphml", "the tasks as a graph in GraphML.", True),
}
"""Option -> module in ``zerograph.cli.export``, its function ``(PlanFile, Path) -> None``, the help, and whether the
function takes a :class:`~zerograph.core.files.runfile.Beside` too."""


def exports(command: F) -> F:
    """An option ``--NAME FILE`` for each of :data:`EXPORTS`."""
    kind = click.Path(dir_okay=False, path_type=Path)
    for name, (_, _, text, _) in reversed(list(EXPORTS.items())):
        command = click.option(f"--{name}", type=kind, metavar="FILE", help=f"Also write {text}")(command)
    return command


@click.command()
@plan_argument
@click.option(
    "--by",
    type=click.Choice(BYS),
    default="layer",
    show_default=True,
    help="Table with a row per layer, kind, tier or op.",
)
@click.option("--top", type=click.IntRange(min=1), help="Only the largest rows, largest first.")
@click.option("--at", metavar="TASK", help="List the memory held once this task (index or name) has started.")
@click.option(
    "--measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="RUN",
    help="Compare a recorded run with the forecast, and with the forecast re-timed by its seconds.",
)
@as_json
@exports
def show(
    plan: Path, by: By, top: int | None, at: str | None, measured: Path | None, json_: bool, **files: Path | None
) -> None:
    """Show the speed and memory of a plan, where they go, and why.

    The table has bytes at the moment when a tier holds the most, and seconds on all streams. Layers that are alike are
    one row, which is true of each of them.
    """
    if at is not None and measured is not None:
        raise click.UsageError("--at shows what the plan holds, --measured what a run did: give one of them")
    written = [_option(name) for name, path in files.items() if path is not None]
    alone = [name for name in written if measured is not None and not EXPORTS[name][3]]
    if alone:
        raise click.UsageError(f"--{alone[0]} draws tensors, and --measured is of a run, which tells only their sum")
    _refuse_overwriting({"PLAN": plan, "--measured": measured}, {_option(n): path for n, path in files.items()})
    file = read_plan(plan)
    beside = None if measured is None else _beside(file, read_run(measured))
    instant = None if at is None else moment(file, find_task(file, at))
    for name, path in files.items():
        if path is not None:
            _export(_option(name), file, path, beside)
    if json_:
        click.echo(json.dumps(to_data(file, beside, by, top, instant), indent=2))
    elif instant is not None:
        show_lines([*moment_lines(file, instant), ""])
        _show(moment_table(file, instant, top))
    else:
        summary.show_summary(file, beside)
        click.echo()
        _show_groups(file, beside, by, top)


def _option(name: str) -> str:
    """The name in :data:`EXPORTS`: click gives options as Python names."""
    return name.replace("_", "-")


def _refuse_overwriting(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    taken = {os.path.realpath(path): name for name, path in read.items() if path is not None}
    for name, path in written.items():
        if path is not None and (other := taken.setdefault(os.path.realpath(path), f"--{name}")) != f"--{name}":
            raise click.UsageError(f"--{name} would write over {other}: give it another FILE")


def _beside(file: PlanFile, run: Run) -> Beside:
    """The measurements of ``run``, and the forecast of ``file`` with its seconds."""
    from zerograph.planner.explain.retime import retimed, tasks_of  # late: it simulates, and few shows do

    return Beside(run, retimed(file, run), tasks_of(file, run))


def to_data(file: PlanFile, beside: Beside | None, by: By, top: int | None, at: Moment | None) -> dict[str, Any]:
    """The data that ``--json`` writes; docs/guide/json.md has the schema."""
    collapsed = grouped(file, by, beside.measured if beside else None)
    rows = group_data(collapsed if top is None else largest_rows(collapsed, by, top))
    data = {"version": VERSION, **summary.as_data(file, beside), "by": by, "rows": rows}
    return data if at is None else {**data, "at": moment_data(file, at)}


def _show_groups(file: PlanFile, beside: Beside | None, by: By, top: int | None) -> None:
    show_lines([(CAPTIONS[by], "italic")])
    _show(group_table(grouped(file, by, beside.measured if beside else None), by, top))


def _show(table: Table) -> None:
    show_table(table.rows, table.numbers, table.below)
    if table.left_out:
        click.echo(f"and {table.left_out} smaller")


def _export(name: str, file: PlanFile, path: Path, beside: Beside | None) -> None:
    module, function, _, _ = EXPORTS[name]
    write: Callable[..., None] = getattr(importlib.import_module(f"zerograph.cli.export.{module}"), function)
    try:
        write(file, path) if beside is None else write(file, path, beside)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", f"--{name} FILE in a folder that exists") from None
    click.echo(f"wrote {path}", err=True)
