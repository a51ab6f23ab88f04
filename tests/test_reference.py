"""``docs/guide/reference.md`` has every public name, and every public name has a docstring."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import zerograph

PAGE = Path(__file__).parents[1] / "docs/guide/reference.md"
LISTED = re.findall(r"^::: (\S+)", PAGE.read_text(), re.MULTILINE)
PUBLIC = [f"zerograph.{name}" for name in zerograph.__all__ if name not in ("__version__", "optim")]
PUBLIC += [f"zerograph.optim.{name}" for name in zerograph.optim.__all__]


def _of_ours(cls: type) -> list[Any]:
    """Public methods and properties that ``cls`` or a base of ours defines."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("zerograph.")]
    public = [value for base in bases for name, value in vars(base).items() if not name.startswith("_")]
    return [value for value in public if inspect.isfunction(value) or isinstance(value, property)]


def test_every_public_name_is_in_the_reference() -> None:
    listed = [resolve_name(name) for name in LISTED if ".integrations." not in name]
    assert [name for name in PUBLIC if resolve_name(name) not in listed] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if "errors" not in name])
def test_public_names_have_docstrings(name: str) -> None:
    found = resolve_name(name)
    everything = [found, *(_of_ours(found) if inspect.isclass(found) else [])]
    assert [thing for thing in everything if not inspect.getdoc(thing)] == []
