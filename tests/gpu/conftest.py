"""GPU tests run on a machine with one GPU; elsewhere they skip and say so. With ``--device=fake`` those that need no
kernels of a GPU run on tests/fake_device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu.accelerator import here

CUDA = {"test_kernels.py"}
"""Files whose tests want a GPU, and no other accelerator."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            wants_cuda = item.path.name in CUDA or item.get_closest_marker("cuda")
            there = torch.cuda.is_available() if wants_cuda else torch.accelerator.is_available()
            if not there:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, of the accelerator's own backend."""
    store, device = dist.FileStore(str(tmp_path / "store"), 1), here()
    if device.type == "cuda":
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("fakeccl", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
