"""``MODEL`` on the command line: ``file.py:callable``, ``module:callable``, or a Hugging Face ``config.json``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.tracebacks import line_of


def model_maker(text: str, *, batch: int = 1, seq: int = 1024, given: Sequence[str] = ()) -> Callable[[], Any]:
    """The callable that ``text`` names, not called; for a config file one that builds its model.

    Args:
        batch, seq: shape of the token ids that the model of a config file is given.
        given: options of that shape that the user has given: what the callable returns may bring no other inputs.

    Raises:
        ConfigError: no such file, module or attribute, not a callable, or a config that makes no model.
    """
    if text.endswith(".json"):
        from zerograph.cli.huggingface import config_maker

        return config_maker(Path(text), batch, seq)
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(
            f"{text!r} names no model", "give file.py:callable, module:callable, or a Hugging Face config.json"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    made = getattr(module, name, None)
    if not callable(made):
        found = "not a callable" if hasattr(module, name) else "not there"
        public = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        meant = get_close_matches(name, public) or sorted(public)
        raise ConfigError(f"{name} is {found} in {where}", f"it has {', '.join(meant) or 'no callable'}")
    _refuse_arguments(text, made)

    def make() -> Any:
        with _of_the_user(text):
            found = made()
        if given and isinstance(found, tuple):
            raise ConfigError(
                f"{text} brings its inputs, whose sizes count, and {' and '.join(given)} is given",
                "leave that out, or return the model alone, which is then given token ids of --batch by --seq",
            )
        return found

    return make


@contextmanager
def _of_the_user(text: str) -> Iterator[None]:
    """Raise errors of the user's own code as errors about MODEL; their traceback stays the cause."""
    try:
        yield
    except ZeroGraphError:
        raise
    except SystemExit as error:  # a script that reads the command line, or trains, when it is imported
        raise ConfigError(
            f"{text} ends the process (SystemExit: {error})",
            'put what only a run of the script should do under: if __name__ == "__main__":',
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        line = line_of(error)
        place = f"mend {line.filename}:{line.lineno}; " if line is not None else ""
        raise ConfigError(f"{text} raises {what}", f"{place}-v shows the traceback") from error


def _refuse_arguments(text: str, made: Callable[..., Any]) -> None:
    """MODEL is called with none."""
    try:
        signature = inspect.signature(made)
    except ValueError:  # a callable in C tells its signature to nobody
        return
    try:
        # Before minutes of imports: the callable is called much later.
        signature.bind()
    except TypeError as error:
        message = f"{text} cannot be called without arguments: {error}"
        raise ConfigError(message, "name a function that needs none") from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", "paths are relative to the current folder")
    name = path.stem if path.stem.isidentifier() and not _taken(path) else f"_{path.stem}_of_the_user"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: its neighbours can be imported
    with _of_the_user(str(path)):
        spec.loader.exec_module(module)
    return module


def _taken(path: Path) -> bool:
    """Whether another module has the name of the file: ``random.py`` must not become everyone's ``random``."""
    there = sys.modules.get(path.stem)
    return path.stem in sys.stdlib_module_names or (there is not None and getattr(there, "__file__", None) != str(path))


def _from_path(name: str) -> ModuleType:
    # As python -m does: modules are looked for in the current folder first.
    sys.path.insert(0, "")
    with _of_the_user(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(f"there is no module {name}", "give file.py:callable for a file") from None
            raise
