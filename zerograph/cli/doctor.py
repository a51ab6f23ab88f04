"""``zerograph doctor``: what works on this machine, and the command that mends what does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from zerograph.cli.checks import Finding, attempt, devices, memory, software, storage
from zerograph.cli.options import as_json, folder
from zerograph.cli.terminal import Cell, progress, show_table

VERSION = 1
REQUIRED = frozenset({"Python", "torch", "native core", "C++ compiler", "torch.compile", "gloo"})
"""The checks that every training needs; the rest is speed, GPUs and offload."""

_STYLES = {"ok": "green", "warning": "yellow", "missing": "red"}
Check = tuple[str, Callable[[], Finding]]


def checks(path: Path, *, deep: bool) -> tuple[Check, ...]:
    """Every check with its name, in the order of the report."""
    compiled: tuple[Check, ...] = (("torch.compile", software.inductor),) if deep else ()
    return (
        ("Python", software.python),
        ("torch", software.torch),
        ("native core", software.native_core),
        ("C++ compiler", software.compiler),
        *compiled,
        ("Triton", devices.triton),
        ("CUDA", devices.cuda),
        ("NCCL", devices.nccl),
        ("gloo", devices.gloo),
        ("pinned memory", devices.pinned_memory),
        ("host", memory.memory),
        ("memlock limit", memory.memlock),
        ("shared memory", memory.shared_memory),
        ("huge pages", memory.huge_pages),
        ("io_uring", storage.io_uring),
        ("O_DIRECT", partial(storage.direct_io, path)),
        ("I/O engine", partial(storage.io_engine, path)),
        ("free space", partial(storage.free_space, path)),
    )


@click.command()
@folder("Check direct I/O and free space in this folder.")
@click.option("--deep", is_flag=True, help="Also compile a small function with torch.compile (some 20 s).")
@as_json
def doctor(path: Path, deep: bool, json_: bool) -> int:
    """Test this machine, and say how to fix what is missing.

    Each line is ok, warning (works, but slower or in part) or missing (does not work here), the fact, and the command
    that mends it. Exits with 1 if something is missing that every training needs.
    """
    findings = []
    with progress() as tell:
        for name, check in checks(path, deep=deep):
            tell(f"checking {name}")
            findings.append(attempt(name, check))
    if json_:
        click.echo(to_json(findings))
    else:
        show_table(rows(findings))
    return int(not works(findings))


def works(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing that every training needs."""
    return not any(f.state == "missing" and f.name in REQUIRED for f in findings)


def to_json(findings: Sequence[Finding]) -> str:
    """The report as JSON; docs/guide/json.md has the schema."""
    data = {"version": VERSION, "works": works(findings), "findings": [asdict(f) for f in findings]}
    return json.dumps(data, indent=2)


def rows(findings: Sequence[Finding]) -> list[list[Cell]]:
    """The report as rows of state, name and fact, with what mends it below."""
    table: list[list[Cell]] = []
    for finding in findings:
        table.append([(finding.state, _STYLES[finding.state]), finding.name, finding.fact])
        if finding.mend:
            table.append(["", "", (f"mend: {finding.mend}", "bold")])
    return table
