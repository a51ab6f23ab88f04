"""A reader of a module finds its tests: by their name, or because they name it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FEW = 60
"""Lines of a module that needs no test file of its own."""
_PATH = re.compile(r"``((?:\w+/)*\w+\.py)``")


def modules() -> dict[str, Path]:
    """Every module by its path within the package: ``runtime/comm/collectives.py``, ``core/program.py``, ``api.py``."""
    inner = ROOT / "zerograph"
    found = {str(p.relative_to(inner)): p for p in inner.rglob("*.py")}
    found |= {str(p.relative_to(ROOT)): p for room in ("passes", "runtime") for p in (ROOT / room).rglob("*.py")}
    return {name: path for name, path in sorted(found.items()) if path.name != "__init__.py"}


def named() -> dict[str, str]:
    """The modules that opening docstrings of tests name, and the test that does."""
    tests = sorted(TESTS.rglob("test_*.py"))
    opening = {str(p.relative_to(TESTS)): ast.get_docstring(ast.parse(p.read_text())) or "" for p in tests}
    return {name: test for test, text in opening.items() for name in _PATH.findall(text)}


def test_every_module_has_a_test_of_its_name_or_is_named_by_one() -> None:
    said, without = named(), []
    for name, path in modules().items():
        own = TESTS / Path(name).parent / f"test_{path.name}"
        if len(path.read_text().splitlines()) > FEW and not own.exists() and name not in said:
            without.append(
                f"{name}: write {own.relative_to(ROOT)}, or name ``{name}`` in the docstring of its test file"
            )
    assert without == []


def test_what_tests_name_is_there() -> None:
    assert {name: test for name, test in named().items() if name not in modules()} == {}
