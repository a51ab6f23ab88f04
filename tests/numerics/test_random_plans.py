"""Plans drawn at random, each bucket in memory or in part on NVMe or the host, train to the bit as without one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from numerics.test_offload import HOST, Net, Run, Trained, _same, adamw, groups
from ranks import run
from torch import Tensor, nn

from zerograph.core.machine import TIERS, machine_named
from zerograph.core.plan import OFFLOADS, Homes
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.runtime import shards

SLOTS = 2**10, 2**16
"""Bytes of a slot: smaller than parameters, and larger than buckets."""


def drawn(path: Path, seed: int, world_size: int, split: bool) -> dict[str, Any]:
    """Write a plan, for a machine whose host is a second memory if it is ``split``; returns what a backend needs to run
    it."""
    draw = Random(seed)
    stage, dtype = draw.choice([1, 2, 3, 3, 3]), draw.choice([None, torch.bfloat16])

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return Net().train(), (torch.zeros(3, 8, dtype=torch.int64),)

    options = {"bucket_size": draw.choice([1, 3000, "8KiB", "20KiB"]), "prefetch": draw.randint(0, 3)}
    given = {} if dtype is None else {"dtype": dtype}
    machine = HOST["machine"] if split else machine_named("cpu")
    away = {"offload": OFFLOADS[stage], "tier": "nvme", "path": str(path.parent), "machine": machine}
    found = compile_only(make, world_size=world_size, stage=stage, **away, **given, **options)
    file = forecast_file("tests", found, machine)
    every = [Homes(*tiers) for tiers in product(TIERS if split else ("device", "nvme"), repeat=3)]
    ways = [homes for homes in every if homes.in_order and homes.least_stage <= stage]
    buckets = []
    for bucket in file.plan.buckets:
        trains = any(p.trainable for p in bucket.params)
        # Of what does not train only the parameters leave.
        homes = draw.choice(ways if trains else [h for h in ways if h == Homes() or h.parameters != "device"])
        buckets.append(replace(bucket, homes=homes, ahead=draw.randint(0, file.plan.prefetch)))
    if not any("nvme" in bucket.homes.away for bucket in buckets):
        buckets[0] = replace(buckets[0], homes=ways[-1])
    plan = replace(file.plan, buckets=tuple(buckets), reductions=draw.randint(1, 3))
    path.write_text(replace(file, plan=plan).to_json())
    return {"plan": path, **given}


def _trains(training: Run, accumulates: bool) -> Trained:
    training.steps(1)
    training.model.eval()
    with torch.no_grad():
        training.compiled(torch.zeros(2, 8, dtype=torch.long))
    training.model.train()
    if accumulates:
        training.backward()
    training.steps(2, clip=0.5)
    return training.result()


def _equal(options: dict[str, Any], folder: str, slot: int, seed: int) -> dict[str, int]:
    shards.SLOT = slot
    make, accumulates = (adamw, groups)[seed % 2], seed % 3 == 0
    away = Run(make, **options, path=folder, nvme="4MiB")  # some optimizers keep three moments
    found = _trains(away, accumulates)
    plan = away.backend.plan
    plain = {"stage": plan.stage, **{name: value for name, value in options.items() if name != "plan"}}
    _same(found, _trains(Run(make, **plain), accumulates))
    return away.backend._store.bytes()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("split", [False, True], ids=["nvme", "host and nvme"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_random_plan_trains_as_in_memory(world_size: int, split: bool, seed: int, tmp_path: Path) -> None:
    options = drawn(tmp_path / "plan.json", seed, world_size, split)
    sizes = run(world_size, _equal, options, str(tmp_path), SLOTS[seed % len(SLOTS)], seed)
    assert any(sizes)
