"""Kernels for a GPU are compiled beside each other, of all segments of a step.

Tests ``compiler/lowering/torch_private.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cuda_shim.process import with_shim


@pytest.mark.costly
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the shim is for torch 2.13")
def test_all_kernels_are_submitted_before_one_is_waited_for(shim: Path, tmp_path: Path) -> None:
    """Inductor by itself waits for those of each segment. Their binaries are stored with it all the same."""
    options = {"COMPILE_THREADS": "2", "WORKER_START": "fork", "CACHE_DIR": str(tmp_path)}
    output = with_shim(
        shim,
        "background.py",
        "llama",
        "background",
        **{f"TORCHINDUCTOR_{name}": value for name, value in options.items()},
    )
    found = json.loads(output.splitlines()[-1])
    events, binaries = found["events"], found["binaries"]
    submitted = events.count("submit")
    assert submitted > 40 and events == ["submit"] * submitted + ["wait"] * len(binaries)
    assert len(binaries) == 10 and all(binaries)
