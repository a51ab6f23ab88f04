"""Settings for tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plans import plan_file


@pytest.fixture(autouse=True)
def _path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands put the folder of a model first on the path, as a script's is; the next test's processes inherit it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_file(4, update=True).to_json())
    return path
