"""Collectives of parameters that all ranks share together with those that two of four do, against plain tensors."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exact import rows, values
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

from zerograph.core.layout import Layout
from zerograph.core.plan import Param
from zerograph.runtime.comm.axes import axes_named, axes_of, axes_of_experts, experts_on
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.connecting import connect_axes
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.experts import ExpertCommunicator
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.comm.wires import finish_gather, start_gather

WORLD = 4
CPU = torch.device("cpu")


def params(experts: int) -> list[Param]:
    """In turn of all ranks and of experts, sharded and whole."""
    same = WORLD // experts
    single = Param("all", (9, 2), "float32", "float32", "float32", True, Layout("rows", WORLD))
    expert = replace(single, name="expert", shape=(5, 3), home=Layout("rows", same), experts=experts)
    whole = replace(single, name="whole", home=Layout("whole", WORLD))
    unsharded = replace(expert, name="whole expert", home=Layout("whole", same))
    return [single, expert, whole, unsharded]


def _collectives(transport: str, experts: int) -> str:
    mesh = init_device_mesh("cpu", (WORLD // experts, experts), mesh_dim_names=("dp", "ep"))
    axes = axes_of_experts(axes_of(init_device_mesh("cpu", (WORLD,))), mesh["dp"].get_group(), experts)
    assert axes_named(axes.name) == axes and experts_on(axes.name) == experts and experts_on("none") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "ZEROGRAPH_TRANSPORT", transport)
        comm = connect_axes(axes, CPU, Rendezvous.open(axes.everyone, CPU))
    assert isinstance(comm, ExpertCommunicator)
    rank = dist.get_rank()
    kind = rank % experts  # which ones
    assert (comm.rank, comm.world_size) == (rank, WORLD)
    with together(comm, Entry("test", 1, 0)):
        some = [p for p in params(experts) if p.sharded]
        full = [values(p, kind if p.experts > 1 else 0) for p in some]
        own = [rows(p, f, rank) for p, f in zip(some, full, strict=True)]
        for p, shard in zip(some, own, strict=True):
            assert shard.shape == p.shard_shape(rank)
        for p, expected, found in zip(some, full, comm.finish_gather(comm.start_gather(some, own)), strict=True):
            assert torch.equal(found, expected), p.name
        wired = [replace(p, gather_wire="bf16") for p in some]
        for p, expected, found in zip(wired, full, finish_gather(comm, start_gather(comm, wired, own)), strict=True):
            assert torch.equal(found, expected.bfloat16().float()), p.name
        found = comm.finish_reduce(comm.start_reduce(params(experts), [values(p, rank) for p in params(experts)]))
    for p, mine in zip(params(experts), found, strict=True):
        ranks = range(kind, WORLD, experts) if p.experts > 1 else range(WORLD)
        mean = sum(values(p, each) for each in ranks) / WORLD
        expected = rows(p, mean, rank) if p.sharded else mean
        torch.testing.assert_close(mine, expected, msg=lambda m, p=p: f"{p.name}: {m}")
    return comm.name


@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize("experts", [2, 4])
def test_all_ranks_and_those_of_the_same_experts(transport: str, experts: int) -> None:
    (name,) = set(run(WORLD, _collectives, transport, experts))
    each = "torch.distributed (gloo)" if transport == "group" else "shared memory"
    assert name == f"{each}; of experts {each if experts == 2 else 'no communication'}"
