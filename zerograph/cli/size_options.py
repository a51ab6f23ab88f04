"""The options that tell a model by its sizes. On their own: other commands start without the planner."""

from __future__ import annotations

import click

from zerograph.cli.options import F, Parsed
from zerograph.planner.estimate.sizes import parse_count

COUNT = Parsed("count", parse_count)
"""A number, such as 128k or 70B."""


SIZES = ("params", "layers", "hidden", "vocab", "heads")


def sizes(command: F) -> F:
    """The options of :data:`SIZES`, which tell a model by its sizes."""
    for option in (
        click.option("--heads", type=COUNT, help="Attention heads; 128 wide unless given."),
        click.option("--vocab", type=COUNT, help="Vocabulary; GPT-2's 50257 unless given."),
        click.option("--hidden", type=COUNT, help="Hidden size."),
        click.option("--layers", type=COUNT, help="Transformer layers."),
        click.option("--params", type=COUNT, help="Parameters, such as 70B or 1.5T; k is 1000 everywhere."),
    ):
        command = option(command)
    return command
