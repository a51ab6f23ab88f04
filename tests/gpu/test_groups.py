"""A group of the accelerator's backend alone, as ``init_process_group("cuda:nccl")`` makes it, reaches no host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu.accelerator import here
from ranks import refused, run
from torch.distributed.device_mesh import DeviceMesh

from zerograph.core.errors import CheckpointError
from zerograph.sharding.optimizer_states import share
from zerograph.sharding.shards import agree


def _from_the_host() -> str:
    group, rank = dist.new_group(backend=f"{here().type}:fakeccl"), dist.get_rank()
    step = torch.tensor(5.0 + rank)  # Adam's, of rank 0 on both
    share([step], DeviceMesh.from_group(group, here().type))
    assert step.item() == 5

    def action() -> None:
        if rank == 1:
            raise OSError("no space")

    agree(group, lambda: None, CheckpointError)
    return refused(agree, group, action, CheckpointError)


def test_what_is_on_the_host_goes_through_the_accelerator() -> None:
    if here().type == "cuda":
        pytest.skip("NCCL connects no ranks that share a GPU")
    assert run(2, _from_the_host) == [
        "CheckpointError: on rank 1: OSError: no space",
        "CheckpointError: OSError: no space",
    ]
