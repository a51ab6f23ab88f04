"""``zerograph passes``: the list of passes, and what each did to the graphs of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from zerograph.cli.options import as_json
from zerograph.cli.terminal import Cell, show_lines, show_table
from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PassRecord, PlanFile
from zerograph.core.files.reading import read_plan

VERSION = 1
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@click.command()
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[PLAN]", required=False)
@click.option("--pass", "name", metavar="NAME", help="This pass only.")
@click.option("--graph", metavar="NAME", help="This graph only: joint, forward or backward.")
@click.option("--diff", "diff", is_flag=True, help="Also the graph before and after, as a unified diff.")
@as_json
def passes(plan: Path | None, name: str | None, graph: str | None, diff: bool, json_: bool) -> None:
    """Show the edits of each pass to the graphs.

    A line for each pass and graph, in the order they ran, with the number of edits. Without a plan, all passes and the
    compiler's other rewrites in the order they run, with the stage of each.
    """
    if plan is None:
        if name or graph or diff:
            raise ConfigError(
                "--pass, --graph and --diff show what passes did to graphs, and no plan is given",
                "zerograph plan MODEL -o plan.json writes one",
            )
        show_pipeline(json_)
        return
    records = chosen(read_plan(plan), name, graph)
    if json_:
        click.echo(json.dumps({"version": VERSION, "passes": [asdict(record) for record in records]}, indent=2))
    elif diff:
        show_lines(diff_lines(records))
    else:
        header: list[Cell] = [(title, "bold") for title in ("graph", "pass", "edits")]
        show_table([header, *([r.graph, r.name, _edits(r)] for r in records)], numbers={2})


def show_pipeline(as_json: bool) -> None:
    """Print all rewrites in order: the stage, the name and the first sentence of each."""
    from zerograph.compiler.pipeline import REWRITES  # torch comes with it

    rows = [(step.stage, step.name, step.does) for step in REWRITES]
    if as_json:
        listed = [{"stage": stage, "name": name, "does": does} for stage, name, does in rows]
        click.echo(json.dumps({"version": VERSION, "pipeline": listed}, indent=2))
    else:
        header: list[Cell] = [(title, "bold") for title in ("stage", "pass", "does")]
        show_table([header, *rows], below={2})


def chosen(file: PlanFile, name: str | None, graph: str | None) -> list[PassRecord]:
    """The records of the pass ``name`` and of ``graph``, where they are given.

    Raises:
        ConfigError: there is none.
    """
    found = [r for r in file.passes if name in (None, r.name) and graph in (None, r.graph)]
    if found:
        return found
    if not file.passes:
        raise ConfigError("the plan tells of no passes", "passes run when a model is compiled, not for an estimate")
    names, graphs = _names(r.name for r in file.passes), _names(r.graph for r in file.passes)
    wanted = " of ".join([f"pass {name!r}"] * (name is not None) + [f"graph {graph!r}"] * (graph is not None))
    raise ConfigError(f"the plan tells of no {wanted}", f"passes: {names}; graphs: {graphs}")


def diff_lines(records: Sequence[PassRecord]) -> Iterator[Cell]:
    """Every graph before and after every pass."""
    for record in records:
        yield f"{record.graph}, {record.name}: {_edits(record)} edits", "bold"
        for line in record.diff.splitlines():
            yield line, "bold" if line.startswith(("--- ", "+++ ")) else _STYLES.get(line[:1], "")
        yield ""


def _edits(record: PassRecord) -> str:
    return str(record.edits)


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
