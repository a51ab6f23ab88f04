"""What the benchmarks share."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("asked", "device", "gpus", "world"),
    [(None, "cpu", 0, 2), (3, "cpu", 0, 3), (None, "cuda", 1, 1), (4, "cuda", 8, 4)],
)
def test_cuda_has_no_more_ranks_than_gpus(
    asked: int | None, device: str, gpus: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    processes = importlib.import_module("facts").processes
    parser = argparse.ArgumentParser()
    assert processes(parser, asked, device) == world
    with pytest.raises(SystemExit):
        processes(parser, gpus + 1, "cuda")
