"""Plans drawn at random in which parameters are in tiles train to the bit as the same tiles in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from numerics.test_tiles import NVME, Net, Tables, Training, planned
from ranks import run
from torch import Tensor, nn

from zerograph.core.machine import TIERS
from zerograph.core.plan import Homes
from zerograph.core.planfile import PlanFile
from zerograph.runtime import shards

SLOTS = 2**10, 2**16
"""Bytes of a slot: smaller than tiles, and larger than parameters."""


def drawn(folder: Path, seed: int, world_size: int, split: bool, net: type[nn.Module]) -> list[Path]:
    """Write two plans with the same tiles: with what else a plan may say, and with one home."""
    draw = Random(seed)
    one = Homes() if world_size > 1 else NVME  # a lone rank has nothing to gather in memory
    every = [Homes(*tiers) for tiers in product(TIERS if split else ("device", "nvme"), repeat=3)]
    ways = [homes for homes in every if homes.in_order]
    tiles: dict[str, int] = {}
    written = []
    for name, homes in (("drawn", Homes("host", "nvme", "nvme") if split else NVME), ("plain", one)):
        path = planned(folder / f"{name}.json", world_size, 5, homes, net)
        file, buckets = PlanFile.from_json(path.read_text()), []
        for bucket in file.plan.buckets:
            own = tiles.setdefault(bucket.params[0].name, draw.randint(1, bucket.tiles))
            bucket = replace(bucket, tiles=own)
            if name == "drawn":
                # Of what does not train only the parameters leave, and a lone rank has tiles of what is off the device.
                away = [homes for homes in ways if homes.parameters != "device"]
                if world_size > 1 or own == 1:
                    away = ways if bucket.params[0].trainable else [Homes(), *away]
                bucket = replace(bucket, homes=draw.choice(away))
            buckets.append(bucket)
        plan = replace(file.plan, buckets=tuple(buckets))
        if name == "drawn":
            buckets[0] = replace(buckets[0], homes=NVME)
            ahead = draw.randint(0, 3)
            plan = replace(plan, buckets=tuple(buckets), prefetch=ahead, reductions=draw.randint(1, 3))
        path.write_text(replace(file, plan=plan).to_json())
        written.append(path)
    return written


def _trained(plan: Path, seed: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Tensor]:
    training = Training(plan, **options)
    for step in range(3):
        training.backward(3 * step)
        if seed % 2:
            training.backward(3 * step + 1)
        training.optimizer.step(clip=0.5)
        training.optimizer.zero_grad(set_to_none=bool(step))
        training.evaluated()
    return training.result()


def _equal(plans: Sequence[Path], seed: int, options: Sequence[dict[str, Any]]) -> None:
    shards.SLOT = SLOTS[seed % len(SLOTS)]
    (losses, values, after), (expected, truth, last) = (
        _trained(plan, seed, own) for plan, own in zip(plans, options, strict=True)
    )
    assert losses == expected
    assert torch.equal(after, last)
    for name, value in truth.items():
        assert torch.equal(values[name], value), name


CASES = [*product((1, 2), (False, True), range(4)), (4, True, 1)]


@pytest.mark.parametrize(("world_size", "split", "seed"), CASES)
def test_random_tiles_train_as_in_one_place(world_size: int, split: bool, seed: int, tmp_path: Path) -> None:
    net = Tables if seed % 3 == 0 else Net
    plans = drawn(tmp_path, seed, world_size, split, net)
    there = {"net": net, "path": str(tmp_path), "nvme": "8MiB"}
    here = there if world_size == 1 else {"net": net}
    run(world_size, _equal, plans, seed, [there, here])
