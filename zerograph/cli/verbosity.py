"""The messages of torch and of their own code that a user sees while a model is built and traced."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import click

from zerograph.cli.shadows import shadows
from zerograph.core.errors import ConfigError, ZeroGraphError

verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Also torch's own log, and the traceback of an error."
)


@contextmanager
def model_code(verbose: bool) -> Iterator[None]:
    """Where a model's code runs: what it prints goes to stderr, since stdout is for data.

    Torch logs pages about an error that ours tells in three lines: unless ``verbose``, or the variable TORCH_LOGS asks
    for it, its log is off. With ``verbose`` the traceback of an error, and of its cause, is written too.

    Raises:
        ConfigError: in place of an error of the model or of an import, where a file beside the model hides a module.
    """
    torch_log, fake_log = logging.getLogger("torch"), logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_log.level
    if not verbose and "TORCH_LOGS" not in os.environ:
        torch_log.setLevel(logging.CRITICAL + 1)
        fake_log.addFilter(_nothing)  # importing torch, maybe in here, gives this one a level of its own
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        if verbose:
            click.echo(traceback.format_exc(), err=True)
        if isinstance(error, ZeroGraphError) and error.__cause__ is None:
            raise  # said by us of ourselves: no import went wrong
        hiding = shadows(Path(sys.path[0]), error.__cause__ or error)
        if not hiding:
            raise
        text = str(error).partition("\n\nhint: ")[0] if isinstance(error, ZeroGraphError) else repr(error)
        raise ConfigError(
            "\n  ".join([text, *map(str, hiding)]), f"rename {hiding[0].file}, which whoever imports its name gets"
        ) from error
    finally:
        torch_log.setLevel(level)
        fake_log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
