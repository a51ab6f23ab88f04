"""Which line of a traceback a user can mend. No torch in here."""

from __future__ import annotations

import functools
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import FrameSummary


def users_line(frames: Iterable[FrameSummary]) -> FrameSummary | None:
    """The innermost of ``frames`` that is not torch's, ours or the standard library's; None where there is none.

    Other libraries count as the user's: transformers' models are wrong where their arguments are.
    """
    return next((frame for frame in reversed(list(frames)) if _users(Path(frame.filename))), None)


def running_line() -> str:
    """The user's line that runs in this thread, as ``file.py:12``; that is a call of torch's or ours by now."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a line of torch's"


def line_of(error: BaseException) -> FrameSummary | None:
    """The user's line that raised ``error``; where it does not parse, that line."""
    if isinstance(error, SyntaxError) and error.filename:
        return FrameSummary(error.filename, error.lineno, "<module>")
    return users_line(traceback.extract_tb(error.__traceback__))


@functools.cache
def _is_users(file: str) -> bool:
    return _users(Path(file))


def _users(file: Path) -> bool:
    # Generated code is called <string> or <eval_with_key>: no file that anyone could mend.
    if file.name.startswith("<") or any(file.is_relative_to(folder) for folder in _not_the_users()):
        return False
    installed = {"site-packages", "dist-packages"} & set(file.parts)  # which may lie in the standard library's folder
    return bool(installed) or not file.is_relative_to(sysconfig.get_path("stdlib"))


def _not_the_users() -> Iterator[Path]:
    """The folders of ZeroGraph and, once it is imported, of torch."""
    yield Path(__file__).parents[1]
    if torch := getattr(sys.modules.get("torch"), "__file__", None):
        yield Path(torch).parent
