"""Processes of their own, in which torch believes in a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent


def build(library: Path) -> None:
    """Make the shared library of `shim.cc`."""
    includes = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *includes, str(HERE / "shim.cc"), "-o", str(library)]
    subprocess.run([*command, f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"], check=True)


def with_shim(shim: Path, script: str, *arguments: str, **environment: str) -> str:
    """What a script of this folder writes, run with that library."""
    own = {"LD_PRELOAD": str(shim), "LD_LIBRARY_PATH": f"{TORCH}/lib", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=os.environ | own | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
