"""Kernels for a GPU are compiled beside each other, of all segments of a step.

Tests ``compiler/lowering/torch_private.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_shim.process import Server


@pytest.mark.costly
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the shim is for torch 2.13")
def test_all_kernels_are_submitted_before_one_is_waited_for(server: Server, tmp_path: Path) -> None:
    """Inductor by itself waits for those of each segment. Their binaries are stored with it all the same."""
    found = server.run("background", "llama", "background", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    events, binaries = found["events"], found["binaries"]
    submitted = events.count("submit")
    assert submitted > 40 and events == ["submit"] * submitted + ["wait"] * len(binaries)
    assert len(binaries) == 10 and all(binaries)
