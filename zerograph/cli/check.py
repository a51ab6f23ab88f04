"""``zerograph check``: what must be true of every plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zerograph.cli.options import SIZE, as_json, plan_argument
from zerograph.cli.terminal import Cell, show_table
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.reading import read_plan, stored_digest
from zerograph.planner.explain.check_file import CHECKS, check_file
from zerograph.sim.check_step import Wrong

VERSION = 1
DIGEST = "digest"
_PLACE = ("check", "task", "module", "source")
SENTENCES = {**CHECKS, DIGEST: "the file is as it was written"}


@click.command()
@plan_argument
@click.option("--memory", type=SIZE, help="Budget of the device, such as 70GiB, in place of the plan's.")
@as_json
def check(plan: Path, memory: int | None, json_: bool) -> int:
    """Check the rules that every plan must keep.

    A line for each check. Exits with 1 when one fails, after saying where: the instruction, its module and source line.
    """
    file = read_plan(plan, verify=False)
    budget = file.budget if memory is None else {**file.budget, "device": memory}
    found = [*check_file(replace(file, budget=budget)), *_changed(file, stored_digest(plan))]
    if json_:
        click.echo(json.dumps(to_data(found), indent=2))
    else:
        show_table(rows(file, found))
    return int(bool(found))


def _changed(file: PlanFile, stored: str) -> list[Wrong]:
    if file.digest == stored:
        return []
    return [Wrong(DIGEST, f"the content has digest {file.digest}, the file says {stored}")]


def to_data(found: Sequence[Wrong]) -> dict[str, Any]:
    """The data that ``--json`` writes; docs/guide/json.md has the schema."""
    failed = {violation.check for violation in found}
    return {
        "version": VERSION,
        "holds": not found,
        "checks": [{"name": name, "holds": name not in failed, "what": text} for name, text in SENTENCES.items()],
        "violations": [{name: getattr(each, name) for name in _PLACE} | {"message": str(each)} for each in found],
    }


def rows(file: PlanFile, found: Sequence[Wrong]) -> list[list[Cell]]:
    """A row for each check; below one that failed, where it first did."""
    table: list[list[Cell]] = []
    for name, sentence in SENTENCES.items():
        broken = [violation for violation in found if violation.check == name]
        if not broken:
            table.append([("ok", "green"), name, sentence])
            continue
        table.append([("failed", "red"), name, (str(broken[0]), "bold")])
        if where := _where(file, broken[0]):
            table.append(["", "", f"at {where}"])
        if len(broken) > 1:
            table.append(["", "", f"and {len(broken) - 1} more (--json lists them)"])
    return table


def _where(file: PlanFile, violation: Wrong) -> str:
    spans, task = file.forecast.spans, violation.task
    instruction = f"task {task}, {spans[task].name}" if 0 <= task < len(spans) else ""
    return ", ".join(text for text in (instruction, violation.module, violation.source) if text)
