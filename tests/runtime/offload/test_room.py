"""Room on NVMe is reserved once, and whoever finds none is told what it was for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerograph.core.errors import StorageError
from zerograph.runtime.offload.blocks import UNIT, Block
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.room import ArenaRoom


def test_extents_are_of_all_parameters_of_a_block(tmp_path: Path) -> None:
    asked = list[int]()
    room = ArenaRoom(lambda size: Arena([tmp_path], size), lambda: asked.append(room.arena.free_bytes))
    block = Block.of("layers.0", torch.bfloat16, {"weight": UNIT, "bias": 3})
    room.reserve(10 * UNIT, lambda: 3 * 2**20)
    assert room.extent(block, block.dtype, "gradients").bytes == 2 * block.elements == 4 * UNIT
    assert asked == []
    with pytest.raises(StorageError, match=r"they are for masters of bucket layers.0(?s:.*)nvme='3MiB'"):
        room.extent(block, torch.float32, "masters")  # what nobody needs is freed first
    assert asked == [6 * UNIT]
