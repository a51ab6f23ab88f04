"""Plans drawn at random, each bucket in memory or in part on NVMe or the host, train to the bit as without one."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import harness
import pytest
import torch
from harness import Rank
from numerics.compare import assert_same
from numerics.test_offload import HOST, Net, adamw, groups
from torch import Tensor, nn

from zerograph.core.machine import TIERS, machine_named
from zerograph.core.plan import OFFLOADS, Placement
from zerograph.dryrun.forecast import forecast_file
from zerograph.runtime.offload import slots

SLOTS = 2**10, 2**16
"""Bytes of a slot: smaller than parameters, and larger than buckets."""


def net() -> tuple[nn.Module, tuple[Tensor]]:
    return Net().train(), (torch.zeros(3, 8, dtype=torch.int64),)


def drawn(path: Path, seed: int, world_size: int, split: bool) -> dict[str, Any]:
    """Write a plan, for a machine whose host is a second memory if it is ``split``; returns what a backend needs to run
    it."""
    draw = Random(5 * world_size + seed)
    stage, dtype = draw.choice([1, 2, 3, 3, 3]), draw.choice([None, torch.bfloat16])
    options = {"bucket_size": draw.choice([1, 3000, "8KiB", "20KiB"]), "prefetch": draw.randint(0, 3)}
    given = {} if dtype is None else {"dtype": dtype}
    offloaded = {"offload": OFFLOADS[stage], "tier": "nvme", "path": "/"}
    found = harness.dry_run(world_size, net, stage=stage, **offloaded, **given, **options)
    file = forecast_file("tests", found, HOST["machine"] if split else machine_named("cpu"))
    every = [Placement(*tiers) for tiers in product(TIERS if split else ("device", "nvme"), repeat=3)]
    ways = [placement for placement in every if placement.in_order and placement.least_stage <= stage]
    buckets = []
    for bucket in file.plan.buckets:
        trains = any(p.trainable for p in bucket.params)
        # Of what does not train only the parameters leave.
        placement = draw.choice(ways if trains else [h for h in ways if h == Placement() or h.parameters != "device"])
        buckets.append(replace(bucket, placement=placement, ahead=draw.randint(0, file.plan.prefetch)))
    if not any("nvme" in bucket.placement.offload_tiers for bucket in buckets):
        buckets[0] = replace(buckets[0], placement=ways[-1])
    plan = replace(file.plan, buckets=tuple(buckets), reductions=draw.randint(1, 3))
    path.write_text(replace(file, plan=plan).to_json())
    return {"plan": path, **given}


def trains(accumulates: bool, rank: Rank) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, parameters and states of this rank, and bytes on NVMe."""
    batches, losses = torch.Generator().manual_seed(rank.rank), list[float]()
    for step in range(3):
        for _ in range(1 + (accumulates and step == 1)):
            loss = rank(torch.randint(0, 37, (3, 8), generator=batches))
            loss.backward()
            losses.append(loss.item())
        rank.optimizer.step(clip=0.5 if step else None)
        rank.optimizer.zero_grad()
        with torch.no_grad():
            losses.append(rank(torch.zeros(3, 8, dtype=torch.long)).item())
    return losses, rank.local(), sum(rank.backend._store.bytes().values())


@functools.cache
def in_memory(world_size: int, accumulates: bool, make: Any, dtype: torch.dtype | None) -> list[Any]:
    """The truth, which several plans share."""
    return harness.run(world_size, partial(trains, accumulates), net, optimizer=make, dtype=dtype)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("split", [False, True], ids=["nvme", "host and nvme"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_random_plan_trains_as_in_memory(
    world_size: int, split: bool, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SLOT", SLOTS[seed % len(SLOTS)])
    options, accumulates = drawn(tmp_path / "plan.json", seed, world_size, split), seed % 3 == 0
    make = (adamw, groups)[seed % 2]
    # Some optimizers keep three moments.
    offloaded = harness.run(
        world_size, partial(trains, accumulates), net, optimizer=make, path=str(tmp_path), nvme="4MiB", **options
    )
    here = in_memory(world_size, accumulates, make, options.get("dtype"))
    for (losses, values, size), (truth, wanted, _) in zip(offloaded, here, strict=True):
        assert losses == truth and size
        assert_same(values, wanted)
