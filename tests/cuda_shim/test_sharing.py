"""Ranks of a host compile each kernel of Triton once.

Tests ``compiler/lowering/triton_torch_private.py``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import triton
from cuda_shim.process import Server

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


@pytest.mark.costly
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the shim is for torch 2.13")
def test_two_devices_of_a_host_have_each_kernel_assembled_once(server: Server, tmp_path: Path) -> None:
    """Inductor by itself gives each device a cache, and both would have assembled every kernel."""
    counting, runs = tmp_path / "ptxas", tmp_path / "runs"
    counting.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo >> {runs} ;; esac\nexec {PTXAS} "$@"\n')
    counting.chmod(0o755)
    assert server.run(
        "sharing", "vit", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), TRITON_PTXAS_PATH=str(counting)
    )
    kernels = Counter(path.parent.name for path in (tmp_path / "cache/triton").rglob("*.cubin"))  # by Triton's keys
    assert set(kernels.values()) == {1} and runs.read_text().count("\n") == len(kernels) > 20
