"""Communication has streams of its own, so that it overlaps compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu.accelerator import here

from zerograph.core.step import Param
from zerograph.runtime.comm.collectives import GroupCommunicator


def _param(rows: int) -> Param:
    return Param("weight", (rows, 1024), "float32", "bfloat16", "float32", trainable=True, sharded=True)


def test_gather_and_reduce_round_trip(alone: dist.ProcessGroup) -> None:
    comm = GroupCommunicator(alone, here())
    shard = torch.randn(512, 1024, device=here())
    (full,) = comm.finish_gather(comm.start_gather([_param(512)], [shard]))
    assert torch.equal(full, shard.bfloat16())
    (grad,) = comm.finish_reduce(comm.start_reduce([_param(512)], [full]))
    assert torch.equal(grad, full.float())


@pytest.mark.cuda
def test_gathers_run_beside_compute(alone: dist.ProcessGroup) -> None:
    comm = GroupCommunicator(alone, here())
    shard = torch.randn(8192, 1024, device=here(), dtype=torch.float32)
    a = torch.randn(8192, 8192, device=here(), dtype=torch.bfloat16)
    comm.finish_gather(comm.start_gather([_param(8192)], [shard]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pending = comm.start_gather([_param(8192)], [shard])
        product = a @ a
        comm.finish_gather(pending)
        torch.cuda.synchronize()
    del product
    streams = {e.device_resource_id for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    assert len(streams) > 1, "the collective ran on the compute stream"
