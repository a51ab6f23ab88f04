"""The command line: ``zerograph COMMAND``.

It starts fast: a command's module is imported when the command is run, and torch when the command needs it. Data goes
to stdout and everything else to stderr. Exit codes: 0, 1 (does not fit, or a check failed), 2 (usage).
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import click

import zerograph
from zerograph.core.errors import ConfigError, UnsupportedError, ZeroGraphError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "estimate": (
        "zerograph.cli.estimate:estimate",
        "Say whether a model fits, and how fast it would be, from its sizes alone.",
    ),
    "plan": ("zerograph.cli.plan:plan", "Plan a training step without running it, and write a plan file."),
    "show": ("zerograph.cli.show:show", "Show the speed and memory of a plan, where they go, and why."),
    "diff": ("zerograph.cli.diff:diff", "List the differences between two plans."),
    "check": ("zerograph.cli.check:check", "Check the rules that every plan must keep."),
    "passes": ("zerograph.cli.passes:passes", "Show the edits of each pass to the graphs."),
    "bench": ("zerograph.cli.bench:bench", "Measure this machine, in seconds."),
    "doctor": ("zerograph.cli.doctor:doctor", "Test this machine, and say how to fix what is missing."),
}
"""Name of a command -> where it is (``module:attribute``), and the line about it in ``zerograph --help``, which is
said here so that listing the commands imports none of them."""

FAILED, USAGE, INTERNAL, INTERRUPTED = 1, 2, 70, 130


class Commands(click.Group):
    """The commands of :data:`COMMANDS`, and one way to show every error."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, which suggests names that are close, and knows none of commands that are not imported yet."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in the help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run, and end the process: a command returns its exit code, or nothing for 0.

        With ``ZEROGRAPH_DEBUG=1`` in the environment our own errors keep their traceback.
        """
        run: Any = super().main  # click's overloads tell modes apart that are one here
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a name that the terminal cannot write is no reason to fail
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        try:
            code = run(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = USAGE
        except click.UsageError as error:
            code = _show(error.format_message(), f"{_path(error)} --help", USAGE)
        except click.ClickException as error:
            code = _show(error.format_message(), "", USAGE)
        except click.Abort:
            code = INTERRUPTED
        except ZeroGraphError as error:
            if os.environ.get("ZEROGRAPH_DEBUG") == "1":
                raise
            message = str(error).partition("\n\nhint: ")[0]
            code = _show(message, error.hint, USAGE if isinstance(error, ConfigError | UnsupportedError) else FAILED)
        except OSError as error:  # a full disk, a file that is gone by now: the system's word, and no mistake of ours
            if os.environ.get("ZEROGRAPH_DEBUG") == "1":
                raise
            where = error.filename or "standard output, or a file that was open"
            code = _show(f"{error.strerror or error}: {where}", "ZEROGRAPH_DEBUG=1 shows the traceback", FAILED)
        except Exception:
            if os.environ.get("ZEROGRAPH_DEBUG") == "1":
                raise
            traceback.print_exc()
            code = _show("this is a mistake in ZeroGraph", "please report it with the lines above", INTERNAL)
        sys.exit(code if isinstance(code, int) else 0)


def _show(message: str, hint: str, code: int) -> int:
    click.echo(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""), err=True)
    return code


def _path(error: click.UsageError) -> str:
    return error.ctx.command_path if error.ctx is not None else "zerograph"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zerograph.__version__, "-V", "--version", prog_name="zerograph", message="%(prog)s %(version)s")
def main() -> None:
    """ZeRO as a compiler pass: look at a training step before paying for it.

    Data is written to stdout, everything else to stderr. Exit codes: 0; 1 if something does not fit or a check failed;
    2 if a command was called in a wrong way.
    """
