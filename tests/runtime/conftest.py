"""A process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store, timeout=timedelta(seconds=77))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
