"""Communication has streams of its own, so that it overlaps compute, and waits for copies without it.

Tests ``runtime/own_stream.py``.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu.accelerator import here, on_it
from numerics import host_cases as cases
from numerics.test_offload import Run, adamw
from ranks import run

from zerograph.core.instructions import Gather, Move, WaitFetch, WaitGather
from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.runtime.comm.collectives import GroupCommunicator, LoneCommunicator
from zerograph.runtime.offload.host import AcceleratorHost
from zerograph.runtime.offload.hosted import HostShards
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.own_stream import OwnStream


def _param(rows: int) -> Param:
    return Param("weight", (rows, 1024), "float32", "bfloat16", "float32", trainable=True, home=Layout("rows", 1))


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


def _computes_for_long(size: int = 1024) -> torch.Event:
    """The end of work in a stream beside the current one."""
    stream, matrix = torch.Stream(device=here()), torch.full((size, size), 1 / size, device=here())
    before = torch.accelerator.current_stream().record_event()
    with stream:
        stream.wait_event(before)
        for _ in range(20 if here().type == "fake" else 2000):
            matrix = matrix @ matrix
        return stream.record_event()


def _computes_meanwhile(late: torch.Event) -> None:
    assert not late.query()
    end = torch.ones(1, device=here()).add_(1)
    torch.accelerator.current_stream().record_event().synchronize()
    assert end.device == here() and not late.query(), "what computes has waited for the copy"


def test_what_computes_waits_for_no_copy_of_a_gather(alone: dist.ProcessGroup) -> None:
    """Its stream does, and whoever waits for the gather."""
    shard = torch.randn(512, 1024, device=here())
    for comm in (GroupCommunicator(alone, here()), LoneCommunicator()):
        late = _computes_for_long()
        wait = lambda late=late: torch.accelerator.current_stream().wait_event(late)  # noqa: E731
        pending = comm.start_gather([_param(512)], [shard], [wait])
        _computes_meanwhile(late)
        (full,) = comm.finish_gather(pending)
        torch.accelerator.current_stream().record_event().synchronize()
        assert late.query() and torch.equal(full, shard.bfloat16())


def test_a_stream_goes_on_where_the_current_one_was() -> None:
    """What was told before has been done, and what is told meanwhile need not wait."""
    own, late = OwnStream(here()), _computes_for_long()
    value = torch.ones(4, device=here()).add_(1)
    with own.behind([lambda: torch.accelerator.current_stream().wait_event(late)]):
        doubled = value * 2
    _computes_meanwhile(late)
    torch.accelerator.current_stream().wait_event(own.end())
    assert doubled.tolist() == [4.0] * 4


def _order(offloaded: str, folder: str) -> list[tuple[bool, bool]]:
    """Of each gather whose shards are fetched, whether its stream waits for them, and whether it begins early."""
    tier = cases.on_host() if offloaded == "host" else cases.on_disk(Path(folder))
    training = Run(adamw, stage=3, prefetch=1, **tier)
    training.steps(1)
    found = []
    for program in (p for frame in training.backend._frames for p in frame.programs.values()):
        steps = [i for i in program.instructions if not isinstance(i, Move)]
        for place, each in enumerate(steps):
            if isinstance(each, Gather) and each.fetched:
                before, behind = steps[place - 1], steps[place + 1]
                assert isinstance(before, WaitFetch)
                found.append((before.by_gather, not isinstance(behind, WaitGather)))
    return found


def test_gathers_of_what_is_on_the_host_begin_early(tmp_path: Path) -> None:
    """Of what is on NVMe they would keep the host waiting, which tells the device what to compute."""
    for found in run(2, on_it, _order, "host", str(tmp_path)):
        assert all(by_gather for by_gather, _ in found) and any(early for _, early in found)
    for found in run(2, on_it, _order, "nvme", str(tmp_path)):
        assert found and not any(by_gather or early for by_gather, early in found)


def test_threads_of_copies_and_updates_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its own: on the first device the threads of all ranks would make contexts. There may be no second
    one here, so that only where they are sent can be seen."""
    sent, there = dict[str, torch.device](), torch.accelerator.set_device_index

    def recorded(device: torch.device) -> None:
        sent[threading.current_thread().name] = device
        there(device)

    monkeypatch.setattr(torch.accelerator, "set_device_index", recorded)
    host, store = AcceleratorHost(here()), ShardStore({}, lambda _: None)
    store.locations.host = HostShards({}, host)
    source, target = host.room(4).fill_(1), host.above(4)
    host.start("h2d", [(source, target)], lambda: None).arrive()
    for begun in (host.after_copies(lambda: None), store.in_background(lambda: None)):
        begun.result(timeout=10)
    assert target.tolist() == [1] * 4
    assert sent == {f"zerograph-{name}_0": here() for name in ("copy-up", "copy-down", "update")}
