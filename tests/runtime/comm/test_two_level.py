"""Collectives in two levels, over two hosts of two ranks, against what plain tensors give.

Tests ``runtime/comm/connecting.py``. Hosts are those that ranks take for their own: `tests/hosts` has real ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exact import TWO_LEVELS, rows, tolerance, values
from ranks import run
from taken_hosts import on_hosts, on_two_hosts, opened
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.core.layout import Layout
from zerograph.core.param_bytes import kept_in_host
from zerograph.core.step import Param
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm import shared_memory
from zerograph.runtime.comm.collectives import LoneCommunicator, sum_over_ranks, together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.connecting import ranks_of_each
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.experts import ExpertCommunicator
from zerograph.runtime.comm.two_level import TwoLevelCommunicator
from zerograph.runtime.comm.wires import finish_gather, host_parts, start_gather, start_gather_inside

WORLD = 4
ROWS, WHOLE = Layout("rows", WORLD), Layout("whole", WORLD)
PARAMS = (
    Param("even", (8, 3), "float32", "float32", "float32", True, ROWS),
    Param("a host without rows", (2, 5), "float32", "float32", "float32", True, ROWS),
    Param("a rank without rows", (6, 2), "float32", "float32", "float32", True, ROWS),
    Param("a short row", (5,), "float32", "float32", "float32", True, ROWS),
    Param("cast", (7, 2), "float32", "bfloat16", "float32", True, ROWS),
    Param("summed in bfloat16", (9,), "float32", "bfloat16", "bfloat16", True, ROWS),
    Param("of 16 bits", (6,), "bfloat16", "bfloat16", "float32", True, ROWS),
    Param("wide", (7, 2), "float64", "float64", "float64", True, ROWS),
    Param("whole", (3, 3), "float32", "float32", "float32", True, WHOLE),
    Param("whole of 16 bits", (3,), "bfloat16", "bfloat16", "bfloat16", True, WHOLE),
    Param("whole and wide", (5,), "float64", "float64", "float64", True, WHOLE),
    Param("scalar", (), "float32", "float32", "float32", True, WHOLE),
)
SHARDED = [p for p in PARAMS if p.sharded]


def check_gathered(comm: Communicator) -> None:
    shards = [rows(p, values(p), comm.rank).to(torch_dtype(p.dtype)) for p in SHARDED]
    for p, full in zip(SHARDED, comm.finish_gather(comm.start_gather(SHARDED, shards)), strict=True):
        torch.testing.assert_close(full, values(p).to(torch_dtype(p.compute_dtype)), rtol=0, atol=0, msg=p.name)


def _collectives() -> None:
    comm = on_two_hosts()
    assert isinstance(comm, TwoLevelCommunicator)
    assert (comm.rank, comm.world_size, comm.hosts, comm.per_host) == (dist.get_rank(), WORLD, 2, 2)
    found = {}
    with together(comm, Entry("test", 1, 7)):
        check_gathered(comm)
        for divisor in (1, 3):
            grads = [values(p, comm.rank, divisor).to(torch_dtype(p.compute_dtype)) for p in PARAMS]
            found[divisor] = comm.finish_reduce(comm.start_reduce(PARAMS, grads))
    assert comm.steps == 7
    for p, exact, rough in zip(PARAMS, found[1], found[3], strict=True):
        mean = torch.stack([values(p, rank) for rank in range(WORLD)]).mean(0)
        expected = rows(p, mean.to(torch_dtype(p.dtype)), comm.rank)
        torch.testing.assert_close(exact, expected, rtol=0, atol=0, msg=p.name)
        terms = torch.stack([values(p, rank, 3).to(torch_dtype(p.compute_dtype)) for rank in range(WORLD)]).double()
        expected = rows(p, terms.mean(0), comm.rank)
        torch.testing.assert_close(rough.double(), expected, rtol=0, atol=tolerance(p), msg=p.name)
    assert sum_over_ranks(comm, torch.tensor(float(comm.rank)), "sum") == 6


def test_buckets_are_gathered_and_gradients_averaged() -> None:
    run(WORLD, _collectives)


def _kept_parts() -> None:
    comm = on_two_hosts()
    assert isinstance(comm, TwoLevelCommunicator)
    wired = [replace(p, gather_wire="int8") if p.name in ("even", "cast") else p for p in SHARDED]
    shards = [rows(p, values(p), comm.rank).to(torch_dtype(p.dtype)) for p in SHARDED]
    for params in (SHARDED, wired):
        with together(comm, Entry("test", 1, 0)):
            full = finish_gather(comm, gather := start_gather(comm, params, shards))
            parts = host_parts(comm, gather)
        assert sum(part.numel() for part in parts) == kept_in_host(params, 2)
        some = [0, 1, len(params) - 1]  # a later program may read fewer
        with together(comm, Entry("test", 2, 0)), pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm.network, "start_gather", None)
            wanted = [params[i] for i in some]
            again = finish_gather(comm, start_gather_inside(comm, wanted, [parts[i] for i in some]))
        for i, tensor in zip(some, again, strict=True):
            torch.testing.assert_close(tensor, full[i], rtol=0, atol=0, msg=params[i].name)
    # A frame of a model with experts that reads none.
    comm = ExpertCommunicator(LoneCommunicator(), comm)
    with together(comm, Entry("test", 3, 0)):
        finish_gather(comm, gather := start_gather(comm, wired, shards))
        again = finish_gather(comm, start_gather_inside(comm, wired, host_parts(comm, gather)))
    for p, tensor, expected in zip(wired, again, full, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=p.name)


def test_hosts_gather_the_same_bits_from_the_parts_that_they_kept() -> None:
    run(WORLD, _kept_parts)


def _one_order() -> None:
    """Means of a parameter that is sharded and of the same one whole, of terms whose sums round."""
    comm = on_two_hosts()
    param = Param("weight", (37, 5), "float32", "float32", "float32", True, ROWS)
    grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(comm.rank))
    every = [torch.empty_like(grad) for _ in range(WORLD)]
    dist.all_gather(every, grad)
    with together(comm, Entry("test", 1, 0)):
        (part,) = comm.finish_reduce(comm.start_reduce([param], [grad]))
        (whole,) = comm.finish_reduce(comm.start_reduce([replace(param, home=WHOLE)], [grad]))
    assert torch.equal(whole, ((every[0] + every[1]) + (every[2] + every[3])) / WORLD)
    assert torch.equal(part, rows(param, whole, comm.rank))


def test_sums_are_taken_by_host_at_every_stage() -> None:
    run(WORLD, _one_order)


def _under_way() -> None:
    comm, several = on_two_hosts(), [replace(PARAMS[0], name=f"weight {i}") for i in range(3)]
    with together(comm, Entry("test", 1, 0)):
        begun = [comm.start_reduce([p], [values(p, comm.rank)]) for p in several]
        gathering = [comm.start_gather([p], [rows(p, values(p), comm.rank)]) for p in several]
        means = [comm.finish_reduce(one)[0] for one in begun]
        full = [comm.finish_gather(one)[0] for one in gathering]
    for p, mean, gathered in zip(several, means, full, strict=True):
        assert torch.equal(mean, rows(p, torch.stack([values(p, rank) for rank in range(WORLD)]).mean(0), comm.rank))
        assert torch.equal(gathered, values(p))


def _large() -> float:
    """Gradients of which two add up to more than float16 has, and whose mean over all is one of them."""
    comm = on_two_hosts()
    param = Param("weight", (4,), "float32", "float16", "float16", True, ROWS)
    with together(comm, Entry("test", 1, 0)):
        grad = torch.full((4,), 40_000.0, dtype=torch.float16)
        (mean,) = comm.finish_reduce(comm.start_reduce([param], [grad]))
    return mean.item()


def test_sums_of_a_host_overflow_no_sooner_than_means() -> None:
    assert run(WORLD, _large) == [40_000.0] * WORLD


def test_several_operations_may_be_under_way() -> None:
    run(WORLD, _under_way)


def _exchanged() -> None:
    comm = on_two_hosts()
    sizes = [[(3 * sender + receiver) % 5 for receiver in range(WORLD)] for sender in range(WORLD)]
    sends = [torch.full((size,), 10 * comm.rank + to, dtype=torch.uint8) for to, size in enumerate(sizes[comm.rank])]
    with together(comm, Entry("test", 1, 0)):
        found = comm.finish_exchange(comm.start_exchange(sends, sizes))
    for sender, message in enumerate(found):
        assert message.tolist() == [10 * sender + comm.rank] * sizes[sender][comm.rank]


def test_messages_of_each_rank_for_each() -> None:
    run(WORLD, _exchanged)


def _fails(failing: int) -> str:
    comm = on_two_hosts()
    if comm.rank == failing:
        with pytest.raises(ZeroDivisionError) as caught, together(comm, Entry("program", 1, 0)):  # noqa: PT012
            check_gathered(comm)
            raise ZeroDivisionError(f"by rank {failing}")
    else:
        with pytest.raises(RankError) as caught, together(comm, Entry("program", 1, 0)):  # noqa: PT012
            check_gathered(comm)
            comm.finish_reduce(comm.start_reduce(PARAMS[:1], [values(PARAMS[0])]))
    comm.rejoin()
    assert comm.generation == 1
    with together(comm, Entry("the next", 2, 0)):
        check_gathered(comm)
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 3])
def test_an_error_on_one_rank_is_one_on_all_and_the_next_program_runs(failing: int) -> None:
    for rank, text in enumerate(run(WORLD, _fails, failing)):
        told = f"rank {failing} failed: ZeroDivisionError: by rank {failing}"
        assert rank == failing or (told in text and text.startswith(f"rank {rank} cannot go on")), text


def _differ(other: tuple[int, ...]) -> list[str]:
    comm, rank, texts = on_two_hosts(), dist.get_rank(), []
    for entry in (Entry(f"program {rank in other}", int(rank in other), 0), Entry("program", 2, int(rank in other))):
        with pytest.raises((CollectiveMismatch, RankError)) as caught, together(comm, entry):
            pass  # memory compares at the end
        texts.append(str(caught.value))
    with together(comm, Entry("the same", 3, 5)):
        check_gathered(comm)
    return texts


@pytest.mark.parametrize("other", [(3,), (2, 3), (1, 3)], ids=["one rank", "a host", "one of each host"])
def test_ranks_that_enter_different_programs_are_all_reported_and_go_on(other: tuple[int, ...]) -> None:
    for programs, steps in run(WORLD, _differ, other):
        assert "program True" in programs and "program False" in programs
        assert "optimizer steps" in steps


def test_hosts_of_equally_many_ranks() -> None:
    assert ranks_of_each(["a"]) == 1
    assert ranks_of_each(["a", "a", "a"]) == 3
    assert ranks_of_each(["a", "a", "b", "b"]) == 2
    assert ranks_of_each(["a", "b"]) == 1
    # Neither uneven ones, nor such whose ranks are not numbered one after the other, have a level of their own.
    assert ranks_of_each(["a", "a", "b"]) == 1
    assert ranks_of_each(["a", "a", "a", "b"]) == 1
    assert [ranks_of_each(list(hosts)) for hosts in ("aabbb", "aabbccc", "aabbcca")] == [1, 1, 1]
    assert ranks_of_each(["a", "b", "a", "b"]) == 1


def _uneven(first: int) -> str:
    with on_hosts(lambda rank: int(rank >= first)):
        comm = opened()
    with together(comm, Entry("test", 1, 0)):
        check_gathered(comm)
    return comm.name


@pytest.mark.parametrize("first", [1, 3])
def test_uneven_hosts_communicate_in_one_level(first: int) -> None:
    assert run(WORLD, _uneven, first) == ["torch.distributed (gloo)"] * WORLD


def _unreachable() -> str:
    with on_hosts() as patch:
        if dist.get_rank() == 3:
            patch.setattr(shared_memory, "_connect", lambda mailbox, peers: "no such process")
        comm = opened()
    with together(comm, Entry("test", 1, 0)):
        check_gathered(comm)
    return comm.name


def test_where_one_host_cannot_share_memory_none_does() -> None:
    assert run(WORLD, _unreachable) == ["torch.distributed (gloo)"] * WORLD


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(18, 18) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return (x * self.scale).square().mean()


def _trained(stage: int, memory: int | None) -> tuple[list[float], str, int]:
    torch.manual_seed(0)
    model, rank = Net(), dist.get_rank()
    backend = zerograph.backend(stage=stage, memory=memory, compute="eager")
    model.compile(backend=backend)
    with on_hosts():
        zerograph.shard(model, backend)
    optimizer, losses = zerograph.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for step in range(4):
        batch = torch.randn(8, 18, generator=torch.Generator().manual_seed(8 * rank + step))
        loss = model(batch)
        loss.backward()
        zerograph.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, backend.report().transport, backend.plan.reductions


def _plainly() -> list[list[float]]:
    torch.manual_seed(0)
    model, losses = Net(), [list[float]() for _ in range(WORLD)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        for rank in range(WORLD):
            loss = model(torch.randn(8, 18, generator=torch.Generator().manual_seed(8 * rank + step)))
            (loss / WORLD).backward()
            losses[rank].append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("stage", "memory"), [(0, None), (1, None), (2, None), (3, None), (3, 10**8)])
def test_losses_are_those_of_one_process(stage: int, memory: int | None) -> None:
    found = run(WORLD, _trained, stage, memory)
    torch.testing.assert_close(torch.tensor([losses for losses, *_ in found]), torch.tensor(_plainly()))
    # A reduction is on its way between hosts while the next one is summed inside of them.
    assert {(name, reductions) for _, name, reductions in found} == {(TWO_LEVELS, 3)}
