"""Files beside a model that hide a module of the same name from everyone who imports it."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shadow:
    """``file`` was imported as ``name``, in place of ``hidden``."""

    name: str
    file: Path
    hidden: str

    def __str__(self) -> str:
        return f"{self.file} hides the module {self.name} of {self.hidden}"


def shadows(folder: Path, error: BaseException) -> list[Shadow]:
    """The files in ``folder`` that were imported, or begun with when ``error`` came, in place of others of their names.

    A model's folder stands first in ``sys.path``, as that of a script does: torch, too, then gets ``random`` from it.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        return []
    run = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    run |= {file for module in list(sys.modules.values()) if isinstance(file := getattr(module, "__file__", None), str)}
    here = {path.relative_to(folder).parts[0] for f in run if (path := Path(f).resolve()).is_relative_to(folder)}
    # Without the folder: what everyone else would have got under that name.
    others = [entry for entry in sys.path if Path(entry).resolve() != folder]
    found = []
    for top in sorted(here):
        spec = PathFinder.find_spec(top.removesuffix(".py"), others)
        if spec is not None and spec.origin is not None and _everyones(Path(spec.origin)):
            found.append(Shadow(spec.name, folder / top, spec.origin))
    return found


def _everyones(module: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(module.parts)) or module.is_relative_to(
        sysconfig.get_path("stdlib")
    )
