"""Plans drawn at random in which parameters are in tiles train to the bit as the same tiles in one place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest
from harness import Rank
from numerics.compare import assert_same
from numerics.test_tiles import NVME, Net, Tables, backward, evaluated, planned, trained
from torch import Tensor, nn

from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import TIERS
from zerograph.core.plan import Placement
from zerograph.runtime.offload import slots

SLOTS = 2**10, 2**16
"""Bytes of a slot: smaller than tiles, and larger than parameters."""


def drawn(folder: Path, seed: int, world_size: int, split: bool, net: type[nn.Module]) -> list[Path]:
    """Write two plans with the same tiles: with what else a plan may say, and with one placement."""
    draw = Random(seed)
    one = Placement() if world_size > 1 else NVME  # a lone rank has nothing to gather in memory
    every = [Placement(*tiers) for tiers in product(TIERS if split else ("device", "nvme"), repeat=3)]
    ways = [placement for placement in every if placement.in_order]
    tiles: dict[str, int] = {}
    written = []
    for name, placement in (("drawn", Placement("host", "nvme", "nvme") if split else NVME), ("plain", one)):
        path = planned(folder / f"{name}.json", world_size, 5, placement, net)
        file, buckets = PlanFile.from_json(path.read_text()), []
        for bucket in file.plan.buckets:
            own = tiles.setdefault(bucket.params[0].name, draw.randint(1, bucket.tiles))
            bucket = replace(bucket, tiles=own)
            if name == "drawn":
                # Of what does not train only the parameters leave, and a lone rank has tiles of what is off the device.
                offloaded = [placement for placement in ways if placement.parameters != "device"]
                if world_size > 1 or own == 1:
                    offloaded = ways if bucket.params[0].trainable else [Placement(), *offloaded]
                bucket = replace(bucket, placement=draw.choice(offloaded))
            buckets.append(bucket)
        plan = replace(file.plan, buckets=tuple(buckets))
        if name == "drawn":
            buckets[0] = replace(buckets[0], placement=NVME)
            ahead = draw.randint(0, 3)
            plan = replace(plan, buckets=tuple(buckets), prefetch=ahead, reductions=draw.randint(1, 3))
        path.write_text(replace(file, plan=plan).to_json())
        written.append(path)
    return written


def trains(seed: int, rank: Rank) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for step in range(3):
        losses += [backward(rank, 3 * step + part) for part in range(1 + seed % 2)]
        rank.optimizer.step(clip=0.5)
        rank.optimizer.zero_grad(set_to_none=bool(step))
        after = evaluated(rank)
    return losses, {"after": after, **rank.local()}


CASES = [*product((1, 2), (False, True), range(4)), (4, True, 1)]


@pytest.mark.parametrize(("world_size", "split", "seed"), CASES)
def test_random_tiles_train_as_in_one_place(
    world_size: int, split: bool, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SLOT", SLOTS[seed % len(SLOTS)])
    net = Tables if seed % 3 == 0 else Net
    there = {"path": str(tmp_path), "nvme": "8MiB"}
    found = [
        trained(plan, world_size, net, partial(trains, seed), **options)
        for plan, options in zip(
            drawn(tmp_path, seed, world_size, split, net), (there, there if world_size == 1 else {}), strict=True
        )
    ]
    for (losses, values), (truth, wanted) in zip(*found, strict=True):
        assert losses == truth
        assert_same(values, wanted)
