"""The finding of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``zerograph doctor``.

    Attributes:
        name: of what was checked.
        state: "ok", "warning" (works, but slower or in part) or "missing" (does not work here).
        fact: what was seen, with numbers.
        mend: the command, or the sentence, that mends it; empty where there is nothing to mend.
    """

    name: str
    state: State
    fact: str
    mend: str = ""


def attempt(name: str, check: Callable[[], Finding]) -> Finding:
    """The finding of ``check``; a check that fails itself is a finding too and stops no other one."""
    try:
        return check()
    except Exception as error:
        return Finding(name, "warning", f"could not be checked: {first_line(error)}")


def first_line(error: BaseException | str) -> str:
    """One line of an error, for a table."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
