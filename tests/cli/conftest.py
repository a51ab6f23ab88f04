"""Settings for tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import plan_file


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_file(4, update=True).to_json())
    return path
