"""Checks of single arguments that users give, each with an error that names the argument."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from zerograph.core.errors import ConfigError


def require(condition: bool, message: str, hint: str) -> None:
    """Raises:
    ConfigError: ``condition`` does not hold.
    """
    if not condition:
        raise ConfigError(message, hint)


def require_kind(value: object, kind: type, function: str, hint: str) -> None:
    """Require that ``function`` was given a ``kind``."""
    # By type alone: the text of a model has pages.
    message = f"{function} got {type(value).__name__} in the place of a {kind.__name__}"
    require(isinstance(value, kind), message, hint)


def require_flag(name: str, value: object, hint: str) -> None:
    """Require a bool: of any other value it would be a guess whether it was meant for this argument."""
    require(type(value) is bool, f"{name} must be True or False, got {value!r:.80}", hint)


def number(name: str, value: Any, hint: str) -> float:
    """``value``, a number or a tensor of one element, as a float; a tensor on a device is waited for."""
    if not isinstance(value, str | bytes):
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            return float(value)
    raise ConfigError(f"{name} must be a number, got {value!r:.80}", hint)


def paths(name: str, given: object, what: str, hint: str) -> tuple[str, ...]:
    """``given``, one path or several, as texts; ``what`` says what is there ("a folder")."""
    several = [given] if isinstance(given, str | os.PathLike) else given
    entries = list(several) if isinstance(several, Iterable) and not isinstance(several, Mapping) else [None]
    found = tuple(os.fspath(path) for path in entries if isinstance(path, str | os.PathLike))
    require(
        len(found) == len(entries) and all(found), f"{name} must be {what} or a list of them, got {given!r:.80}", hint
    )
    return found
