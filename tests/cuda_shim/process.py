"""Processes of their own, in which torch believes in a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent


def build(library: Path) -> None:
    """Make the shared library of `shim.cc`."""
    includes = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *includes, str(HERE / "shim.cc"), "-o", str(library)]
    subprocess.run([*command, f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"], check=True)


class Server:
    """The process of `server.py`, with the library ``shim`` loaded; its stderr goes to ``errors``."""

    def __init__(self, shim: Path, errors: Path) -> None:
        self._errors = errors
        own = {
            "LD_PRELOAD": str(shim), "LD_LIBRARY_PATH": f"{TORCH}/lib", "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "server.py")],
                env=os.environ | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip

    def run(self, module: str, *arguments: Any, **environment: str) -> Any:
        """What ``main`` of a module of this folder returns in a new process, for arguments that are JSON."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([module, environment, arguments]), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline() or "null")
        assert found is not None, self._errors.read_text()[-4000:]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
