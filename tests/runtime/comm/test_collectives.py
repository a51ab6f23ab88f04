"""Collectives of whole buckets, over both transports, against what plain tensors give.

Tests ``runtime/comm/communicator.py``.
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from exact import TWO_LEVELS, rows, values
from ranks import run
from torch import Tensor

from zerograph.core.errors import CollectiveMismatch, ConfigError, RankError
from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.runtime.comm import connecting
from zerograph.runtime.comm.collectives import (
    Communicator,
    GroupCommunicator,
    sum_over_ranks,
    together,
)
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.torch_private import is_registered

CPU = torch.device("cpu")
TRANSPORTS = ["auto", "group", "hosts"]
PARAMS = (
    Param("even", (4, 3), "float32", "float32", "float32", True, Layout("rows", 1)),
    Param("uneven", (5,), "float32", "float32", "float32", True, Layout("rows", 1)),
    Param("fewer rows than ranks", (1, 2), "float32", "float32", "float32", True, Layout("rows", 1)),
    Param("cast", (3, 2), "float32", "bfloat16", "float32", True, Layout("rows", 1)),
    Param("summed in bfloat16", (6,), "float32", "bfloat16", "bfloat16", True, Layout("rows", 1)),
    Param("whole", (2, 2), "float32", "float32", "float32", True, Layout("whole", 1)),
    Param("scalar", (), "float32", "float32", "float32", True, Layout("whole", 1)),
)


def laid(*params: Param) -> list[Param]:
    """All, or these, over the ranks that there are."""
    return [replace(p, home=p.home.over(dist.get_world_size())) for p in params or PARAMS]


def opened(transport: str) -> Communicator:
    """Of "hosts" each has two ranks."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        if transport == "hosts":
            patch.setattr(connecting, "this_host", lambda: f"host {group.rank() // 2}")
        else:
            patch.setitem(os.environ, "ZEROGRAPH_TRANSPORT", transport)
        return connecting.connect(group, CPU, Rendezvous.open(group, CPU))


def own(param: Param, full: Tensor) -> Tensor:
    """What this rank has of ``full``."""
    return rows(param, full, dist.get_rank())


def _collectives(transport: str) -> str:
    comm, world = opened(transport), dist.get_world_size()
    params = laid()
    sharded = [p for p in params if p.sharded]
    with together(comm, Entry("test", 1, 0)):
        pending = comm.start_gather(sharded, [own(p, values(p)) for p in sharded])
        full = comm.finish_gather(pending)
        grads = [values(p, dist.get_rank()).to(getattr(torch, p.compute_dtype)) for p in params]
        mine = comm.finish_reduce(comm.start_reduce(params, grads))
    for p, found in zip(sharded, full, strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, values(p).to(getattr(torch, p.compute_dtype)), rtol=0, atol=0)
    for p, found in zip(params, mine, strict=True):
        summed = torch.stack([values(p, rank) for rank in range(world)]).sum(0).to(getattr(torch, p.reduce_dtype))
        torch.testing.assert_close(found, own(p, (summed / world).float()), rtol=0, atol=0)
    return comm.name


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_buckets_are_gathered_whole_and_gradients_averaged(world: int, transport: str) -> None:
    (name,) = set(run(world, _collectives, transport))
    several = TWO_LEVELS if world == 4 else "shared memory"
    assert name == {"auto": "shared memory", "group": "torch.distributed (gloo)", "hosts": several}[transport]


def _not_contiguous(transport: str) -> None:
    """Of transposed shards, one copy of which may not take the place of another, and of a gradient with strides."""
    comm, (p,) = opened(transport), laid(PARAMS[0])
    several = [replace(p, name=f"{p.name}{i}", shape=(64, 96)) for i in range(3)]
    shards = [own(each, values(each)).t().contiguous().t() for each in several]
    grad = values(several[0]).t().contiguous().t()
    with together(comm, Entry("test", 1, 0)):
        full = comm.finish_gather(comm.start_gather(several, shards))
        (mean,) = comm.finish_reduce(comm.start_reduce(several[:1], [grad]))
    assert all(torch.equal(found, values(each)) for found, each in zip(full, several, strict=True))
    assert torch.equal(mean, shards[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_elements_may_lie_in_any_order(transport: str) -> None:
    run(2, _not_contiguous, transport)


def _differ(transport: str) -> tuple[str, str]:
    """What ranks say that begin different programs, and that have taken different numbers of steps."""
    comm, rank, texts = opened(transport), dist.get_rank(), []
    for entry in (Entry(f"program {rank}", rank, 0), Entry("program", 2, rank)):
        with pytest.raises(CollectiveMismatch) as caught, together(comm, entry):
            pass  # the mailbox compares at the end
        texts.append(str(caught.value))
    with together(comm, Entry("the same", 3, 5)):
        assert comm.generation == 2 and comm.steps == 5
    return texts[0], texts[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_enter_different_programs_are_all_reported_and_go_on(transport: str) -> None:
    for rank, (programs, steps) in enumerate(run(2, _differ, transport)):
        assert programs.startswith(f"rank {rank} and rank {1 - rank} are about to run different programs")
        assert "program 0" in programs and "program 1" in programs
        assert f"rank {rank} has taken {rank} optimizer steps and rank {1 - rank} {1 - rank}" in steps


def _fails(transport: str) -> None:
    comm, params = opened(transport), laid(PARAMS[0])
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError), together(comm, Entry("program", 1, 0)):
            raise ZeroDivisionError("by rank 0")
    else:
        text = "rank 0 failed: ZeroDivisionError: by rank 0"
        with pytest.raises(RankError, match=text), together(comm, Entry("program", 1, 0)):
            comm.finish_gather(comm.start_gather(params, [own(params[0], values(params[0]))]))
    comm.rejoin()
    with together(comm, Entry("the next", 2, 0)):
        (full,) = comm.finish_gather(comm.start_gather(params, [own(params[0], values(params[0]))]))
    assert torch.equal(full, values(PARAMS[0])), "nothing of the old generation is taken for a message of the new one"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_on_one_rank_is_one_on_all_and_the_next_program_runs(transport: str) -> None:
    run(2, _fails, transport)


def test_a_transport_that_is_none(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGRAPH_TRANSPORT", "pigeon")
    with pytest.raises(
        ConfigError, match=r"(?s)ZEROGRAPH_TRANSPORT='pigeon' names no transport.*\"auto\" or \"group\""
    ):
        connecting.connect(group, CPU)


class Landing:
    """A collective of NCCL: waiting lets the stream wait, and only then may its memory be used for something else."""

    def __init__(self, work: dist.Work, memory: Tensor) -> None:
        self.work, self.memory = work, weakref.ref(memory)

    def wait(self) -> None:
        assert self.memory() is not None
        self.work.wait()
        self.work = None


def _given_up() -> None:
    """As on NCCL: a bucket's gathers in one launch, and an error before they are waited for."""
    comm = GroupCommunicator(dist.group.WORLD, CPU)
    comm.coalesces = True
    params = laid()
    sharded = [p for p in params if p.sharded]
    shards = [own(p, values(p)) for p in sharded]
    full = comm.finish_gather(comm.start_gather(sharded, shards))
    assert all(torch.equal(f, values(p).to(f)) for p, f in zip(sharded, full, strict=True))
    pending = comm.start_gather(sharded, shards)
    flight = pending.work
    flight.work = landing = Landing(flight.work, pending.full.tensors[0])
    comm.abort("an error")
    assert landing.work is None and flight.work is None
    del pending
    assert landing.memory() is None, "nothing of the communicator's holds what was given up"
    comm.abort("another one")


def test_what_is_in_flight_on_a_stream_is_waited_for_after_an_error() -> None:
    run(2, _given_up)


class Splitting(dist.ProcessGroupGloo):
    """What ProcessGroupNCCL does where groups are made: all ranks of a communicator split it."""

    Options = SimpleNamespace
    supports_splitting = True
    made: ClassVar[list[Splitting]] = []  # Python's part of them lives no longer than they do here

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        super().__init__(store, rank, size, timedelta(seconds=5))
        self.connected: torch.device | None = None
        self.made.append(self)
        if parent := getattr(options, "split_from", None):
            parent.perform_nocolor_split(CPU)

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.barrier().wait()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device

    def name(self) -> str:
        return "nccl"


def _bound_to_devices(folder: str) -> None:
    """``init_process_group("nccl", device_id=...)`` twice, each time a mesh of ranks 0 and 1, and nothing more from
    rank 2."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0)
    stores = [dist.FileStore(f"{folder}/{name}", world) for name in ("nccl", "nccl again", "gloo")]
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_NCCL_AVAILABLE", True)
        patch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", Splitting, raising=False)
        for store in stores[:2]:
            dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
            dist.group.WORLD.bound_device_id = device
            group = dist.new_group([0, 1])
            if rank < 2:
                comm, made = GroupCommunicator(group, device), len(Splitting.made)
                assert comm.reduce_group is not group and comm.reduce_group.size() == 2
                assert is_registered(comm.reduce_group), "it is not that of the groups before"
                assert Splitting.made[-1].connected == device, "the first reduction does not have to"
                assert dist.group.WORLD.bound_device_id == device
                assert GroupCommunicator(group, device).reduce_group is comm.reduce_group
                assert len(Splitting.made) == made, "another backend has a communicator of its own"
            dist.destroy_process_group()
    dist.init_process_group("gloo", store=stores[2], rank=rank, world_size=world)


def test_the_group_of_reductions_is_made_by_its_own_ranks(tmp_path: Path) -> None:
    run(3, _bound_to_devices, str(tmp_path))


def test_without_a_meeting_nothing_is_compared(group: dist.ProcessGroup) -> None:
    """As simulated ranks have it."""
    comm = GroupCommunicator(group, CPU)
    assert (comm.compares, comm.generation) == (False, 0)
    with together(comm, Entry("program", 1, 7)):
        (full,) = comm.finish_gather(comm.start_gather([PARAMS[1]], [values(PARAMS[1])]))
    assert torch.equal(full, values(PARAMS[1])) and comm.steps == 7
    comm.abort("nobody hears it")
    comm.rejoin()


def _exchanges(transport: str) -> None:
    """Messages of all sizes, of none too, and two exchanges under way at once."""
    comm, world, rank = opened(transport), dist.get_world_size(), dist.get_rank()
    sizes = [[(3 * sender + 2 * receiver) % 4 * 1000 for receiver in range(world)] for sender in range(world)]
    back = [list(column) for column in zip(*sizes, strict=True)]

    def message(sender: int, receiver: int, of: list[list[int]]) -> Tensor:
        return torch.full((of[sender][receiver],), 10 * sender + receiver, dtype=torch.uint8)

    with together(comm, Entry("test", 1, 0)):
        begun = [comm.start_exchange([message(rank, r, of) for r in range(world)], of) for of in (sizes, back)]
        for of, pending in zip((sizes, back), begun, strict=True):
            found = comm.finish_exchange(pending)
            assert all(torch.equal(found[r], message(r, rank, of)) for r in range(world))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_gets_the_messages_that_are_for_it(world: int, transport: str) -> None:
    run(world, _exchanges, transport)


def _exchange(comm: Communicator, fails: bool = False) -> int:
    with together(comm, Entry("update", 1, 0)):
        if fails:
            raise RuntimeError("by its own")
        return len(comm.finish_exchange(comm.start_exchange([torch.zeros(8, dtype=torch.uint8)] * 2, [[8, 8], [8, 8]])))


def _fails_in_an_exchange(transport: str) -> None:
    comm, rank = opened(transport), dist.get_rank()
    with pytest.raises(RuntimeError, match="by its own" if rank else "rank 1.*by its own"):
        _exchange(comm, fails=bool(rank))
    assert _exchange(comm) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exchange_ends_where_another_rank_fails(transport: str) -> None:
    run(2, _fails_in_an_exchange, transport)


def _sums() -> None:
    comm = opened("auto")
    rank = float(dist.get_rank())
    total = sum_over_ranks(comm, torch.tensor([rank, 1.0, 0.5]), "test")
    assert total.tolist() == [1.0, 2.0, 1.0] and sum_over_ranks(comm, torch.tensor(rank), "test") == 1.0


def test_numbers_are_summed_one_by_one() -> None:
    run(2, _sums)


def _by_default_elsewhere(transport: str) -> None:
    """The meta device stands for an accelerator: nothing can be read of what is made there."""
    comm, rank = opened(transport), dist.get_rank()
    params = [*laid(), *laid(replace(PARAMS[0], name="in fewer bits", reduce_wire="int8"))]
    sharded = [p for p in params if p.sharded]
    shards = [own(p, values(p)) for p in sharded]
    grads = [values(p, rank).to(getattr(torch, p.compute_dtype)) for p in params]
    sends = [torch.full((8,), rank, dtype=torch.uint8) for _ in range(comm.world_size)]
    sizes = [[8] * comm.world_size] * comm.world_size
    found = []
    for mode in (nullcontext(), torch.device("meta")):
        with mode, together(comm, Entry("test", 1, 0)):
            full = comm.finish_gather(comm.start_gather(sharded, shards))
            reduced = comm.finish_reduce(comm.start_reduce(params, grads))
            found.append([*full, *reduced, *comm.finish_exchange(comm.start_exchange(sends, sizes))])
            if rank == 1:
                time.sleep(0.2)
                comm.rendezvous.store.count("come to the end", 1)
        assert comm.rendezvous.store.count("come to the end") == len(found), "a rank has left before another one came"
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_of_ours_are_not_made_on_the_default_device(transport: str) -> None:
    run(4 if transport == "hosts" else 2, _by_default_elsewhere, transport)
