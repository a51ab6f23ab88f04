"""Each module needs its own library only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import zerograph.integrations
assert "torch" not in sys.modules
import zerograph.integrations.{module}
print(*sorted({{"accelerate", "transformers", "lightning"}} & sys.modules.keys()))
"""


@pytest.mark.parametrize(("module", "others"), [("accelerate", {"lightning"}), ("lightning", {"accelerate"})])
def test_importing_one_imports_no_other_library(module: str, others: set[str]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the optional extra {module} is not installed")
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert module in run.stdout.split() and not others & set(run.stdout.split())
