"""GPU tests run on a machine with one GPU; elsewhere they skip and say so. Those of tiers run on any accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ANY = {"test_tiers.py"}
"""Files whose tests want an accelerator of whatever kind."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            there = torch.accelerator.is_available() if item.path.name in ANY else torch.cuda.is_available()
            if not there:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
