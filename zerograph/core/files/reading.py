"""Plan files and measured runs, read from disk: what is wrong with a file names the file. No torch in here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from zerograph.core.errors import ConfigError
from zerograph.core.files.kinds import read_as
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Run


def read_plan(path: Path, *, verify: bool = True) -> PlanFile:
    """The plan in ``path``; without ``verify`` also one that was changed by hand.

    Raises:
        ConfigError: the file cannot be read, or holds no plan.
    """
    return read_as(path, partial(PlanFile.from_json, verify=verify))


def stored_digest(path: Path) -> str:
    """The digest that stands in ``path``, right or not; :func:`read_plan` has read the file before."""
    return read_as(path, lambda text: str(json.loads(text)["digest"]))


def read_run(path: Path) -> Run:
    """The measured run in ``path``.

    Raises:
        ConfigError: the file cannot be read, or holds no run.
    """
    return read_as(path, Run.from_json)


def check_writable(path: Path) -> None:
    """Raise where ``path`` cannot be written, before seconds are spent on what is to be saved there.

    Raises:
        ConfigError: ``path`` is no file that can be written.
    """
    existed = path.exists()
    try:
        # Trying is the only sure test; "a" leaves what an existing file holds.
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "-o FILE in a folder that exists") from None
    if not existed:
        path.unlink()
