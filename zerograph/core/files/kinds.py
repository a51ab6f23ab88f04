"""JSON files: the kind that one is of, and errors that name the file. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zerograph.core.errors import ConfigError, ZeroGraphError

T = TypeVar("T")
_KINDS = {
    "a plan": ({"plan", "spans", "digest"}, "`zerograph show`, `diff`, `check` and `passes` read plans"),
    "a machine": ({"device_memory", "matmul"}, "it is for --machine"),
    "a measured run": ({"segments", "gathers", "update"}, "it is for `zerograph show PLAN --measured`"),
    "the config of a Hugging Face model": ({"model_type"}, "`zerograph plan` and `estimate` take it as MODEL"),
}
"""By name, the fields that only this kind has, and what reads it."""


def refuse_other_kind(data: object, wanted: str, hint: str) -> None:
    """Nothing, unless ``data`` is of a kind that ZeroGraph knows, and not the one that was ``wanted``.

    Raises:
        ConfigError: saying what the file is, and what reads it.
    """
    for kind, (fields, readers) in _KINDS.items():
        if kind != wanted and isinstance(data, dict) and fields <= data.keys():
            raise ConfigError(f"this is {kind}, not {wanted}", f"{readers}; {hint}")


def versioned(text: str, kind: str, version: int, hint: str, again: str) -> dict[str, Any]:
    """The data of a file of that ``kind`` and ``version``.

    Raises:
        ConfigError: another kind, with ``hint``; or another version, with the hint ``again``.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    refuse_other_kind(data, kind, hint)
    name = kind.removeprefix("a ")
    fields, _ = _KINDS[kind]
    # Other files have a version, too: its number would say nothing here. Another version may have other fields.
    if not isinstance(data, dict) or fields.isdisjoint(data):
        raise ConfigError(f"the file holds no {name}", hint)
    if data.get("version") != version:
        raise ConfigError(f"the {name} has version {data.get('version')}, this ZeroGraph reads {version}", again)
    if not fields <= data.keys():
        raise ConfigError(f"the file holds no {name}", hint)
    return data


def read_as(path: Path, parse: Callable[[str], T], hint: str = "") -> T:
    """The result of ``parse`` on the text of ``path``.

    Raises:
        ConfigError: the file cannot be read, with ``hint``; or ``parse`` refuses it. Names the file.
    """
    try:
        return parse(path.read_text(errors="replace"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint) from None
    except ZeroGraphError as error:
        message = str(error).removesuffix(f"\n\nhint: {error.hint}")
        raise ConfigError(f"{path}: {message}", error.hint) from None
