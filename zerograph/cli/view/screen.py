"""The first output of ``show`` and ``plan`` on stdout: a plan's totals, memory per tier, work per stream."""

from __future__ import annotations

import click

from zerograph.cli.terminal import drawable, show_table, width
from zerograph.cli.view import summary
from zerograph.cli.view.drawing import BAR, BLOCKS
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside

NARROWEST, WIDEST = 16, 60
BESIDE_SPARKLINE = 44
"""Columns that the name of a tier and its peak need."""


def show_summary(file: PlanFile, beside: Beside | None = None) -> None:
    """Write the summary of ``file`` as three tables, beside what a run measured, and the forecast with its seconds."""
    unicode = drawable(BLOCKS + BAR)
    drawing = min(max(width() - BESIDE_SPARKLINE, NARROWEST), WIDEST)
    run = beside.measured if beside is not None else None
    show_table(summary.headline(file, beside))
    click.echo()
    show_table(summary.memory(file, run, drawing, unicode=unicode))
    click.echo()
    show_table(summary.streams(file, run, unicode=unicode), numbers={2, 3})
