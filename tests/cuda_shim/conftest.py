"""The shim that stands for CUDA, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_shim.process import build


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its library."""
    if torch.version.cuda is not None:
        pytest.skip("torch has the CUDA that the shim stands for")
    library = tmp_path_factory.mktemp("shim") / "libshim.so"
    build(library)
    return library
