"""What ``show`` and ``plan`` write to stdout first: what a plan comes to, memory per tier, work per stream."""

from __future__ import annotations

import click

from zerograph.cli.terminal import drawable, show_table, width
from zerograph.cli.view import summary
from zerograph.cli.view.drawing import BAR, BLOCKS
from zerograph.forecast import Forecast
from zerograph.planfile import PlanFile

NARROWEST, WIDEST = 16, 60
BESIDE_SPARKLINE = 44
"""Columns that the name of a tier and its peak need."""


def show_summary(file: PlanFile, run: Forecast | None = None) -> None:
    """Write the summary of ``file`` as three tables, beside what a run measured if there is one."""
    unicode = drawable(BLOCKS + BAR)
    drawing = min(max(width() - BESIDE_SPARKLINE, NARROWEST), WIDEST)
    show_table(summary.headline(file, run))
    click.echo()
    show_table(summary.memory(file, run, drawing, unicode=unicode))
    click.echo()
    show_table(summary.streams(file, run, unicode=unicode), numbers={2, 3})
