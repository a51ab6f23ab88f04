"""Where shards and their copies lie, by the rule, in the store, and in forecasts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import Rank
from torch import Tensor, nn

from zerograph.core.instructions import Gather, Move
from zerograph.core.layout import Layout
from zerograph.core.machine import Machine, Tier, machine_named
from zerograph.core.placement import copy_tier, values_tier
from zerograph.core.plan import Placement
from zerograph.core.step import Param
from zerograph.planner.programs.placement import Shards, bytes_on

CPU = machine_named("cpu")
SPLIT = replace(CPU, split=True)
NVME = Placement("nvme", "nvme", "nvme")
STATES = Placement(optimizer="nvme")
HOST = Placement("host", "host", "host")
STATES_BELOW = Placement("host", "host", "nvme")


@pytest.mark.parametrize(
    ("dtype", "trainable", "placement", "split", "values", "copy"),
    [
        ("float32", True, Placement(), False, "device", None),
        ("float32", True, STATES, False, "nvme", "device"),  # a master, of which 16 bits are gathered
        ("float32", True, NVME, False, "nvme", "nvme"),
        ("float32", False, NVME, False, "nvme", "nvme"),  # a frozen base is cast once, and not in each step
        ("float32", False, STATES, False, "device", None),
        ("bfloat16", True, STATES, False, "device", None),  # updated where it is gathered from
        ("bfloat16", True, NVME, False, "nvme", None),
        ("bfloat16", True, STATES, True, "nvme", "device"),
        ("bfloat16", True, STATES_BELOW, True, "nvme", "host"),
        ("bfloat16", True, HOST, True, "host", None),
        ("float32", True, HOST, True, "host", "host"),
        ("bfloat16", False, STATES_BELOW, True, "host", None),
    ],
)
def test_the_rule(
    dtype: str, trainable: bool, placement: Placement, split: bool, values: Tier, copy: Tier | None
) -> None:
    param = Param("weight", (4, 4), dtype, "bfloat16", "float32", trainable, home=Layout("rows", 1))
    assert (values_tier(param, placement, split), copy_tier(param, placement, split)) == (values, copy)


class Adapted(nn.Module):
    """A frozen base with an adapter, as PEFT makes them; shards fill blocks of NVMe, and one parameter stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(128, 128, bias=False), nn.Parameter(torch.ones(1))
        self.down, self.up = nn.Linear(128, 64, bias=False), nn.Linear(64, 128, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.scale.dtype)  # which computes
        return self.base(x) + self.scale * self.up(self.down(x))


def made() -> tuple[nn.Module, tuple[Tensor]]:
    return Adapted(), (torch.empty(4, 128),)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)


def _found(machine: Machine, rank: Rank) -> dict[str, tuple[int, int]]:
    """Bytes of parameters and of what is fetched of each bucket: there and as planned."""
    rank(torch.ones(4, 128)).square().mean().backward()
    rank.optimizer.step()
    (frame,), staging = rank.backend._frames, "host" if machine.split else "device"
    lying = sum(rank.backend._store.bytes().get(kind, 0) for kind in ("parameters", "copies"))
    sizes = bytes_on("nvme", frame.plan, 0, staging)
    found = {"on NVMe": (lying, sizes["parameters"] + sizes["optimizer states"])}
    fetched = defaultdict[int, int](int)
    for each in frame.programs["forward"].instructions:
        if isinstance(each, Move) and each.what == "shard" and not each.staged:
            fetched[each.bucket] += each.bytes
    for bucket in frame.plan.buckets:
        size = Shards.of(bucket.params, 0, staging).at(bucket.placement).fetched
        found[bucket.name] = fetched[bucket.index], size if bucket.placement.parameters != "device" else 0
    return found


@pytest.mark.parametrize("machine", [CPU, SPLIT], ids=["one memory", "split"])
@pytest.mark.parametrize("offload", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_plans_count_what_is_there(machine: Machine, offload: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    options = {"stage": 3, "dtype": dtype, "bucket_size": 1, "machine": machine}
    offloaded = {"offload": offload, "path": str(tmp_path)}
    for found in harness.run(2, partial(_found, machine), made, optimizer=sgd, **options, **offloaded):
        assert all(there == planned for there, planned in found.values()), found
        assert (found["on NVMe"][0] > 0) == (machine.split or dtype is not None or offload == "parameters")


def _gathered(rank: Rank) -> dict[str, int]:
    """Bytes that the gather of each bucket of the forward fills."""
    (frame,) = rank.backend._frames
    program = frame.programs["forward"]
    gathers = (each for each in program.instructions if isinstance(each, Gather))
    return {program.buckets[each.bucket]: program.contents[each.out].bytes for each in gathers}


@pytest.mark.parametrize("bucket_size", [1, "1MiB"])
def test_one_rank_casts_a_frozen_master_that_stays(bucket_size: int | str, tmp_path: Path) -> None:
    """Trained masters are on NVMe, with copies on the device; what is not updated stays, and each gather casts it."""
    options = {"stage": 3, "dtype": torch.bfloat16, "bucket_size": bucket_size, "machine": CPU}
    offloaded = {"offload": "optimizer", "path": str(tmp_path)}
    (found,) = harness.run(1, _gathered, made, optimizer=sgd, **options, **offloaded)
    assert sum(found.values()) == 128 * 128 * 2
    assert len(found) == (4 if bucket_size == 1 else 1)


def _room(rank: Rank) -> int:
    store = rank.backend._store
    return store.room.arena.size


def test_there_is_room_for_frozen_parameters_that_train_later(tmp_path: Path) -> None:
    offloaded = {"stage": 3, "dtype": torch.bfloat16, "offload": "optimizer", "path": str(tmp_path)}
    (room,) = harness.run(1, _room, made, optimizer=sgd, **offloaded)
    trained, frozen = 2 * 64 * 128, 128 * 128
    assert room >= (trained + frozen) * 4 + trained * 2 * 4  # masters of all, and two moments
