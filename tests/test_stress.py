"""The native core under many threads at once; .ci/sanitize runs the same program under sanitizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_many_threads_forks_and_an_early_end(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("stress.py")), "fork"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
