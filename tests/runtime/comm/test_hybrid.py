"""Collectives over two axes, two replicas of two shards on four ranks, against what plain tensors give.

Tests ``runtime/comm/paired.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exact import rows, tolerance, values
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.core.layout import Layout
from zerograph.core.plan import Param
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm.axes import axes_of
from zerograph.runtime.comm.collectives import sum_over_ranks, together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.connecting import connect_axes
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.hybrid import HybridCommunicator
from zerograph.runtime.comm.rendezvous import Rendezvous

CPU = torch.device("cpu")
TRANSPORTS = ["auto", "group"]
SHARDS = 2
PARAMS = (
    Param("even", (4, 3), "float32", "float32", "float32", True, Layout("rows", SHARDS)),
    Param("uneven", (5,), "float32", "float32", "float32", True, Layout("rows", SHARDS)),
    Param("fewer rows than ranks", (1, 2), "float32", "float32", "float32", True, Layout("rows", SHARDS)),
    Param("cast", (3, 2), "float32", "bfloat16", "float32", True, Layout("rows", SHARDS)),
    Param("summed in bfloat16", (6,), "float32", "bfloat16", "bfloat16", True, Layout("rows", SHARDS)),
    Param("of 16 bits", (6,), "bfloat16", "bfloat16", "float32", True, Layout("rows", SHARDS)),
    Param("wide", (7, 2), "float64", "float64", "float64", True, Layout("rows", SHARDS)),
    Param("whole", (2, 2), "float32", "float32", "float32", True, Layout("whole", SHARDS)),
    Param("whole of 16 bits", (3,), "bfloat16", "bfloat16", "bfloat16", True, Layout("whole", SHARDS)),
    Param("whole and wide", (3,), "float64", "float64", "float64", True, Layout("whole", SHARDS)),
    Param("scalar", (), "float32", "float32", "float32", True, Layout("whole", SHARDS)),
)
SHARDED = [p for p in PARAMS if p.sharded]


def opened(transport: str, mesh: DeviceMesh | None = None) -> Communicator:
    axes = axes_of(mesh if mesh is not None else init_device_mesh("cpu", (2, SHARDS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "ZEROGRAPH_TRANSPORT", transport)
        return connect_axes(axes, CPU, Rendezvous.open(axes.everyone, CPU))


def own(param: Param, full: Tensor) -> Tensor:
    """The rows of this rank, of which another replica has the same."""
    return rows(param, full, dist.get_rank() % SHARDS)


def gathered(comm: Communicator) -> list[Tensor]:
    shards = [own(p, values(p)).to(torch_dtype(p.dtype)) for p in SHARDED]
    return comm.finish_gather(comm.start_gather(SHARDED, shards))


def check_gathered(found: list[Tensor]) -> None:
    for p, full in zip(SHARDED, found, strict=True):
        torch.testing.assert_close(full, values(p).to(torch_dtype(p.compute_dtype)), rtol=0, atol=0, msg=p.name)


def averaged(comm: Communicator, divisor: int = 1) -> list[Tensor]:
    grads = [(values(p, dist.get_rank()) / divisor).to(torch_dtype(p.compute_dtype)) for p in PARAMS]
    return comm.finish_reduce(comm.start_reduce(PARAMS, grads))


def same_on_replicas(tensors: list[Tensor]) -> None:
    for p, mine in zip(PARAMS, tensors, strict=True):
        everyone: list[Tensor] = [torch.empty(0)] * 4
        dist.all_gather_object(everyone, mine)
        assert torch.equal(everyone[dist.get_rank() % SHARDS], mine), p.name


def _collectives(transport: str) -> str:
    comm = opened(transport)
    assert isinstance(comm, HybridCommunicator)
    assert (comm.rank, comm.world_size) == (dist.get_rank() % SHARDS, SHARDS)
    with together(comm, Entry("test", 1, 7)):
        check_gathered(gathered(comm))
        mine = averaged(comm)
        rough = averaged(comm, 3)
    assert comm.steps == 7
    for p, found in zip(PARAMS, mine, strict=True):
        mean = torch.stack([values(p, rank) for rank in range(4)]).mean(0).to(torch_dtype(p.dtype))
        torch.testing.assert_close(found, own(p, mean), rtol=0, atol=0, msg=lambda m, p=p: f"{p.name}: {m}")
    for p, found in zip(PARAMS, rough, strict=True):
        expected = torch.stack([(values(p, r) / 3).to(torch_dtype(p.compute_dtype)).double() for r in range(4)]).mean(0)
        torch.testing.assert_close(found.double(), own(p, expected), rtol=0, atol=tolerance(p))
    same_on_replicas(mine)
    same_on_replicas(rough)
    # A number of shards is summed over one replica.
    assert sum_over_ranks(comm, torch.tensor(float(dist.get_rank() % SHARDS + 1)), "sum") == 3
    return comm.name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buckets_are_gathered_over_shards_and_averaged_over_all(transport: str) -> None:
    (name,) = set(run(4, _collectives, transport))
    each = "torch.distributed (gloo)" if transport == "group" else "shared memory"
    assert name == f"{each}; between replicas {each}"


def _two_under_way() -> None:
    """Reductions begun before the first ends, as prefetching programs do, and a rank that has no row of any."""
    comm, few = opened("auto"), [replace(PARAMS[2], name=f"one row {i}") for i in range(3)]
    with together(comm, Entry("test", 1, 0)):
        begun = [comm.start_reduce([p], [values(p, dist.get_rank())]) for p in few]
        gathering = comm.start_gather(few, [own(p, values(p)) for p in few])
        found = [comm.finish_reduce(one)[0] for one in begun]
        full = comm.finish_gather(gathering)
    for p, mine, whole in zip(few, found, full, strict=True):
        mean = torch.stack([values(p, rank) for rank in range(4)]).mean(0)
        assert torch.equal(mine, own(p, mean)) and torch.equal(whole, values(p))
    assert (found[0].shape[0] == 0) == (comm.rank == 1)


def test_several_operations_may_be_under_way() -> None:
    run(4, _two_under_way)


def _fails(transport: str, failing: int) -> str:
    comm = opened(transport)
    if dist.get_rank() == failing:
        with pytest.raises(ZeroDivisionError) as caught, together(comm, Entry("program", 1, 0)):  # noqa: PT012
            gathered(comm)
            raise ZeroDivisionError(f"by rank {failing}")
    else:
        with pytest.raises(RankError) as caught, together(comm, Entry("program", 1, 0)):  # noqa: PT012
            gathered(comm)
            averaged(comm)
    comm.rejoin()
    assert comm.generation == 1
    with together(comm, Entry("the next", 2, 0)):
        check_gathered(gathered(comm))
        same = averaged(comm)
    same_on_replicas(same)
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("failing", [0, 3])
def test_an_error_on_one_rank_is_one_on_all_and_the_next_program_runs(failing: int, transport: str) -> None:
    for rank, text in enumerate(run(4, _fails, transport, failing)):
        told = f"rank {failing} failed: ZeroDivisionError: by rank {failing}"
        assert rank == failing or (told in text and text.startswith(f"rank {rank} cannot go on")), text


def _differ(transport: str, other: tuple[int, ...]) -> tuple[str, str]:
    """The errors on ranks of which ``other`` ones begin another program, or have taken another number of steps."""
    comm, rank, texts = opened(transport), dist.get_rank(), []
    entries = (
        Entry(f"program {rank in other}", int(rank in other), 0), Entry("program", 2, int(rank in other)),
    )  # fmt: skip
    for entry in entries:
        with pytest.raises((CollectiveMismatch, RankError)) as caught, together(comm, entry):
            pass  # the mailbox compares at the end
        texts.append(str(caught.value))
    with together(comm, Entry("the same", 3, 5)):
        check_gathered(gathered(comm))
        assert comm.generation == 2 and comm.steps == 5
    return texts[0], texts[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("other", [(3,), (2, 3), (1, 3)], ids=["one rank", "a replica", "a shard"])
def test_ranks_that_enter_different_programs_are_all_reported_and_go_on(other: tuple[int, ...], transport: str) -> None:
    found = run(4, _differ, transport, other)
    for programs, steps in found:
        assert "about to run different programs" in programs
        assert "program True" in programs and "program False" in programs
        assert "optimizer steps" in steps
    for rank, (programs, _) in enumerate(found):
        if programs.startswith(f"rank {rank} and rank "):
            them = int(programs.removeprefix(f"rank {rank} and rank ")[0])
            assert (rank in other) != (them in other), programs


def _part(transport: str) -> list[int] | None:
    """Two replicas on ranks 1 and 3 of the job's four: errors name ranks as the mesh numbers them."""
    mesh = DeviceMesh("cpu", [[1], [3]])
    if mesh.get_coordinate() is None:
        return None
    comm, p = opened(transport, mesh), replace(PARAMS[0], home=Layout("rows", 1))
    assert (comm.rank, comm.world_size) == (0, 1)
    with together(comm, Entry("test", 1, 0)):
        (full,) = comm.finish_gather(comm.start_gather([p], [values(p)]))
        (mean,) = comm.finish_reduce(comm.start_reduce([p], [values(p, dist.get_rank())]))
    assert torch.equal(full, values(p)) and torch.equal(mean, (values(p, 1) + values(p, 3)) / 2)
    if dist.get_rank() == 3:
        with pytest.raises(ZeroDivisionError), together(comm, Entry("test", 1, 0)):
            raise ZeroDivisionError
    else:
        with pytest.raises(RankError, match="rank 1 failed: ZeroDivisionError"), together(comm, Entry("test", 1, 0)):
            comm.finish_reduce(comm.start_reduce([p], [full]))
    with together(comm, Entry("the next", 1, 0)):
        (mean,) = comm.finish_reduce(comm.start_reduce([p], [values(p, dist.get_rank())]))
    return mean.flatten().tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mesh_of_a_part_of_the_ranks(transport: str) -> None:
    first, second, third, fourth = run(4, _part, transport)
    assert first is third is None and second == fourth is not None


def _no_replicas() -> str:
    return opened("auto", init_device_mesh("cpu", (1, 4))).name


def test_one_replica_needs_one_transport() -> None:
    assert run(4, _no_replicas) == ["shared memory"] * 4


class _Noting:
    """A transport of one rank that notes what it is asked for."""

    rank, world_size, name, rendezvous, generation, steps, pool = 0, 1, "noting", None, 0, 0, None

    def __init__(self, axis: str, notes: list[str]) -> None:
        self.axis, self.notes = axis, notes

    def start_reduce(self, params: Sequence[Param], grads: Sequence[Tensor]) -> tuple[str, Sequence[Tensor]]:
        self.notes.append(f"{self.axis} start {params[0].name}")
        return params[0].name, grads

    def finish_reduce(self, pending: tuple[str, Sequence[Tensor]]) -> list[Tensor]:
        self.notes.append(f"{self.axis} finish {pending[0]}")
        return list(pending[1])


def test_an_average_is_under_way_while_the_next_reduction_begins() -> None:
    notes = list[str]()
    comm = HybridCommunicator(_Noting("shards", notes), _Noting("replicas", notes))  # type: ignore[arg-type]
    params = [Param(name, (2, 2), *["float32"] * 3, True, Layout("rows", SHARDS)) for name in ("first", "second")]
    first, second = (comm.start_reduce([param], [torch.ones(2, 2)]) for param in params)
    begun = ["shards start first", "shards finish first", "replicas start first", "shards start second"]
    assert notes == begun
    for pending in (first, second):
        comm.finish_reduce(pending)
    ended = ["replicas finish first", "shards finish second", "replicas start second", "replicas finish second"]
    assert notes[4:] == ended
