"""Plans drawn at random in which anything may be in tiles, computed again, and wait anywhere, all in one step, train to
the bit as the same tiles in one place. By kind: test_random_plans.py has placements, test_random_tiles.py tiles of
parameters and test_activations.py what layers save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Rank
from numerics.compare import assert_same, seeded
from numerics.test_offload import adamw
from numerics.test_recompute import LENGTH, ROWS, Model
from numerics.test_tiles import SPLIT
from torch import Tensor, nn

from zerograph.core.machine import Tier, machine_named
from zerograph.core.plan import OFFLOADS, Bucket, Placement, Plan
from zerograph.core.step import Step, layer_of_activation
from zerograph.dryrun.forecast import forecast_file
from zerograph.planner.explain.check_file import check_file
from zerograph.planner.profile.token_tiles import with_token_tiles
from zerograph.runtime.offload import slots

WORDS, LAYERS = 41, 3
SLOTS = 2**10, 2**16
"""Bytes of a slot: smaller than parameters, and larger."""


class Words(nn.Module):
    """A table of words, layers with attention, and a head with its loss."""

    def __init__(self, dropout: float, region: bool) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, 5), Model(dropout, region, LAYERS)
        self.body.head = nn.Linear(self.body.head.in_features, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.body(self.words(ids)).flatten(0, 1), ids.flatten())


def words(dropout: float, region: bool) -> tuple[nn.Module, tuple[Tensor]]:
    return Words(dropout, region).train(), (torch.zeros(ROWS, LENGTH, dtype=torch.int64),)


def drawn(folder: Path, seed: int, world_size: int) -> tuple[tuple[float, bool], dict[str, dict[str, Any]]]:
    """Write plans with the same tiles: a plain one that has all in one place, and two that move what they can. Returns
    what makes the model, and what a backend needs for each plan."""
    draw = Random(seed)
    stage = draw.choice([1, 2, 3, 3, 3])
    given = draw.choice([0.0, 0.3]), draw.random() < 0.3
    # A lone rank that moves nothing has plain parameters, and none in tiles.
    far: dict[str, Any] = dict.fromkeys(OFFLOADS[1 : stage + 1], "nvme")
    one = Placement() if world_size > 1 else Placement(**far)
    offloaded = {"offload": OFFLOADS[stage], "tier": "nvme", "path": "/"}
    rules = {"bucket_size": draw.choice([4, 4, "8KiB"]), "loss_tiles": draw.choice([1, 2, 3])}
    found = harness.dry_run(world_size, words, *given, stage=stage, **rules, **offloaded)
    file, step = forecast_file("tests", found, machine_named("cpu")), found.frame.step
    assert [wrong for wrong in check_file(file) if wrong.check != "budget"] == []
    plain = replace(_divided(file.plan, step, draw, one), reductions=1, prefetch=0)
    plans, state = {"plain": plain}, draw.getstate()
    for split in (False, True):
        draw.setstate(state)
        tiers: list[Tier] = ["host", "nvme"] if split else ["nvme"]
        ways = [Placement(*placement) for placement in product(("device", *tiers), repeat=3)]
        ways = [placement for placement in ways if placement.in_order and placement.least_stage <= stage]
        buckets = tuple(
            replace(bucket, placement=_placement(bucket, ways, draw, world_size)) for bucket in plain.buckets
        )
        plans[" and ".join(tiers)] = replace(
            plain, buckets=buckets, prefetch=draw.randint(0, 3), reductions=draw.randint(1, 3),
            offload=_offloaded(step, draw, tiers), fetch_ahead=draw.randint(1, 4),
        )  # fmt: skip
    options: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        machine = SPLIT if "host" in name else machine_named("cpu")
        path = folder / f"{name}.json"
        path.write_text(replace(forecast_file("tests", found, machine), plan=plan).to_json())
        on_nvme = "nvme" in {tier for _, tier in plan.offload} or any(
            "nvme" in b.placement.offload_tiers for b in plan.buckets
        )
        options[name] = {"plan": path} | ({"path": str(folder), "nvme": "8MiB"} if on_nvme else {})
    return given, options


def _divided(plan: Plan, step: Step, draw: Random, placement: Placement) -> Plan:
    """``plan`` with tiles of parameters and of tokens, and layers that are computed again."""
    names: dict[str, set[str]] = {}
    for op in step.ops:
        names.setdefault(layer_of_activation(op.activation), set()).add(op.activation)
    recompute = [layer for layer in sorted(names) if layer and draw.random() < 0.4]
    save = [name for layer in recompute for name in draw.sample(sorted(names[layer]), 2)]
    tilable = set(step.tilable or ()) if plan.stage == 3 else set()
    buckets = []
    for bucket in plan.buckets:
        alone = len(bucket.params) == 1 and bucket.params[0].name in tilable
        untiled = plan.loss_tiles > 1 and "head" in bucket.name  # which each tile of the loss reads
        most = 1 if untiled or not alone or draw.random() < 0.5 else bucket.params[0].chunk
        buckets.append(replace(bucket, tiles=draw.randint(1, min(5, most)), placement=placement))
    plan = replace(plan, buckets=tuple(buckets), recompute=tuple(recompute), save=tuple(save))
    return with_token_tiles(plan, step, draw.choice([1, 3]))


def _placement(bucket: Bucket, ways: list[Placement], draw: Random, world_size: int) -> Placement:
    # A lone rank has tiles of what is off the device.
    if world_size == 1 and bucket.tiles > 1:
        ways = [placement for placement in ways if placement.parameters != "device"]
    return draw.choice(ways)


def _offloaded(step: Step, draw: Random, tiers: list[Tier]) -> tuple[tuple[str, Tier], ...]:
    """Layers whose activations leave, and some that leave alone."""
    names = sorted({op.activation for op in step.ops if layer_of_activation(op.activation)})
    layers = [layer for layer in sorted({*map(layer_of_activation, names)}) if draw.random() < 0.6]
    return tuple((name, draw.choice(tiers)) for name in (*layers, *draw.sample(names, draw.randint(0, 6))))


def trains(seed: int, rank: Rank) -> tuple[list[Tensor], dict[str, Tensor]]:
    losses = []

    def batch(number: int) -> Tensor:
        return torch.randint(WORDS, (ROWS, LENGTH), generator=seeded(100 * number + rank.rank))

    for step in range(3):
        for part in range(1 + seed % 2):
            torch.manual_seed(step)  # of masks
            loss = rank(batch(2 * step + part))
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
            losses.append(loss.detach())
        rank.optimizer.step(clip=0.5)
        rank.optimizer.zero_grad(set_to_none=bool(step))
        with torch.no_grad():
            torch.manual_seed(step)
            losses.append(rank(batch(step)).clone())
    return losses, rank.local()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_random_step_is_the_same_in_one_place(
    world_size: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SLOT", SLOTS[seed % len(SLOTS)])
    given, plans = drawn(tmp_path, seed, world_size)
    trained = {
        name: harness.run(world_size, partial(trains, seed), words, *given, optimizer=adamw, by_rank=True, **options)
        for name, options in plans.items()
    }
    expected = trained.pop("plain")
    for name, found in trained.items():
        for (losses, values), (truth, wanted) in zip(found, expected, strict=True):
            assert all(torch.equal(loss, there) for loss, there in zip(losses, truth, strict=True)), name
            assert_same(values, wanted)
