"""The shim that stands for CUDA, made once, and a process with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_shim.process import Server, build


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs the scripts of this folder."""
    if torch.version.cuda is not None:
        pytest.skip("torch has the CUDA that the shim stands for")
    folder = tmp_path_factory.mktemp("shim")
    build(folder / "libshim.so")
    with Server(folder / "libshim.so", folder / "errors") as process:
        yield process
