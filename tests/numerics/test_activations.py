"""Where saved activations wait for the backward changes nothing that is computed: losses and gradients are the same to
the bit on the device, computed again, on the host, on NVMe, and on NVMe behind the host."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import harness
import pytest
import torch
from harness import Rank
from numerics.compare import Values, assert_same, full, seeded
from numerics.test_recompute import LENGTH, ROWS, Model
from ranks import run
from torch import Tensor

import zerograph
from zerograph.core.machine import Machine, Tier, machine_named
from zerograph.core.plan import OFFLOADS, Placement
from zerograph.core.step import layer_of_activation
from zerograph.dryrun.forecast import forecast_file

STEPS = 3
SPLIT = replace(machine_named("cpu"), split=True)
LAYERS = 3
Losses = list[float]


def model() -> Model:
    """Attention and dropout in every layer, and a region of torch.utils.checkpoint."""
    return Model(dropout=0.3, region=True, layers=LAYERS)


def made() -> tuple[Model, tuple[Tensor]]:
    return model(), (torch.empty(ROWS, LENGTH, 5),)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(world: int, steps: int, **options: Any) -> list[tuple[Losses, Values, int]]:
    """Of each rank its losses, the last gradients, and bytes of activations on NVMe."""
    given = {} if "plan" in options else {"bucket_size": "8KB"}
    return harness.run(world, partial(_trains, steps), made, optimizer=sgd, **{**given, **options})


def _trains(steps: int, rank: Rank) -> tuple[Losses, Values, int]:
    losses, grads = Losses(), Values()
    for step in range(steps):
        torch.manual_seed(step)  # of masks
        batch = torch.randn(ROWS * rank.world_size, LENGTH, 5, generator=seeded(step))
        loss = rank(batch.chunk(rank.world_size)[rank.rank]).square().mean()
        loss.backward()
        losses.append(loss.item())
        grads = rank.gradients()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
    return losses, grads, rank.backend._store.saved.bytes


def assert_alike(found: list[tuple[Losses, Values, int]], expected: list[tuple[Losses, Values, int]], way: str) -> None:
    for (losses, grads, _), (truth, wanted, _) in zip(found, expected, strict=True):
        assert losses == truth, way
        assert_same(grads, wanted)


def mixed(path: Path, world: int, stage: int, machine: Machine) -> Path:
    """A plan with a layer that is kept, one that is computed again, and one that leaves in part; and all streams."""
    tiers: tuple[Tier, ...] = ("nvme", "host", "nvme") if machine.split else ("nvme",) * 3
    found = harness.dry_run(world, made, stage=stage, bucket_size="8KB")
    names = {op.activation for op in found.frame.step.ops}
    offloaded = tuple(zip(("blocks.1", "blocks.2:where.self#2", "blocks.2:clone#4"), tiers, strict=True))
    assert {name for name, _ in offloaded if layer_of_activation(name)} <= names
    file = forecast_file("tests", found, machine)
    plan = replace(
        file.plan, recompute=("blocks.1",), save=("blocks.1:where.self#2",), offload=offloaded, fetch_ahead=2
    )
    path.write_text(replace(file, plan=plan).to_json())
    return path


FEW = ("on NVMe", "on the host", "behind the host", "the inputs on NVMe", "mixed on NVMe")
"""Those that are tried at every stage."""


def _ways(world: int, stage: int, folder: Path) -> dict[str, dict[str, Any]]:
    plans = [
        mixed(folder / f"{split}.json", world, stage, replace(machine_named("cpu"), split=split))
        for split in (False, True)
    ]
    nvme, host = {"activations": "nvme", "path": str(folder)}, {"activations": "host", "machine": SPLIT}
    return {
        "computed again": {"stage": stage, "recompute": "full"},
        "on NVMe": {"stage": stage, **nvme},
        "on the host": {"stage": stage, **host},
        "behind the host": {"stage": stage, **nvme, "machine": SPLIT},
        "the inputs on NVMe": {"stage": stage, "recompute": "full", **nvme},
        "everything on NVMe": {"stage": stage, "recompute": "none", **nvme},
        "mixed on NVMe": {"plan": plans[0], "path": str(folder)},
        "mixed on both": {"plan": plans[1], "path": str(folder)},
    }


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_where_activations_wait_changes_no_bit(world: int, stage: int, tmp_path: Path) -> None:
    everything, sizes = (world, stage) in ((1, 0), (2, 3)), {}
    kept = train(world, STEPS, stage=stage)
    for way, options in _ways(world, stage, tmp_path).items():
        if everything or way in FEW:
            found = train(world, STEPS, **options)
            assert_alike(found, kept, way)
            sizes[way] = found[0][2]
    seeds = 4096 if torch.__version__ >= (2, 14) else 0  # of masks, which wait as one tensor: a block of the file
    inputs = sizes["the inputs on NVMe"] - seeds
    assert sizes["on NVMe"] > sizes["mixed on NVMe"] >= inputs > 0 == sizes["on the host"]
    assert sizes["behind the host"] == sizes["on NVMe"]
    if everything:
        assert sizes["everything on NVMe"] >= sizes["on NVMe"]
        assert sizes["mixed on NVMe"] >= sizes["mixed on both"] > 0 == sizes["computed again"]


def drawn(path: Path, seed: int, world: int) -> dict[str, Any]:
    """Write a plan in which anything may wait anywhere, and return what a backend needs to run it."""
    draw = Random(seed)
    stage, split = draw.choice([0, 1, 2, 3]), draw.random() < 0.4
    tiers: list[Tier] = ["host", "nvme"] if split else ["nvme"]
    rules = {"stage": stage, "recompute": draw.choice(["auto", "none"]), "prefetch": draw.randint(0, 2)}
    options: dict[str, Any] = {**rules, "bucket_size": draw.choice([1, "4KiB", "32KiB"])}
    found = harness.dry_run(world, made, **options)
    file = forecast_file("tests", found, SPLIT if split else machine_named("cpu"))
    names: dict[str, set[str]] = {}
    for op in found.frame.step.ops:
        names.setdefault(layer_of_activation(op.activation), set()).add(op.activation)
    recompute, save, offload = [], list[str](), list[tuple[str, Tier]]()
    for layer in [f"blocks.{i}" for i in range(LAYERS)]:
        again = draw.random() < 0.4
        recompute += [layer] * again
        save += draw.sample(sorted(names[layer]), 3 * again)
        offload += [(layer, draw.choice(tiers))] * (draw.random() < 0.5)
        offload += [(name, draw.choice(tiers)) for name in draw.sample(sorted(names[layer]), draw.randint(0, 6))]
    decided = {"recompute": tuple(recompute), "save": tuple(save), "offload": tuple(offload)}
    shards_on = draw.choice(tiers)
    placement = (
        Placement(**dict.fromkeys(OFFLOADS[1 : draw.randint(0, stage) + 1], shards_on)) if world > 1 else Placement()
    )
    buckets = tuple(
        replace(b, placement=placement if any(p.sharded for p in b.params) else b.placement) for b in file.plan.buckets
    )
    plan = replace(file.plan, **decided, buckets=buckets, fetch_ahead=draw.randint(1, 4))
    path.write_text(replace(file, plan=plan).to_json())
    on_nvme = "nvme" in {tier for _, tier in offload} | placement.offload_tiers
    offloaded = {"path": str(path.parent)} if on_nvme else {}
    return {"plan": path, **offloaded, "rules": options}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [1, 2])
def test_a_random_plan_gives_the_same_bits(world: int, seed: int, tmp_path: Path) -> None:
    options = drawn(tmp_path / "plan.json", seed, world)
    kept = train(world, 3, **options.pop("rules"))
    assert_alike(train(world, 3, **options), kept, f"seed {seed}")


def _llama(transformers: Any) -> Any:
    small = {"vocab_size": 67, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_hidden_layers=6, num_key_value_heads=1))


def _gpt2(transformers: Any) -> Any:
    sizes = {"vocab_size": 67, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _of_transformers(folder: str, make: Any, compute: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")
    found = []
    for more in ({}, {"activations": "nvme", "path": folder}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = make(transformers).train()
        backend = zerograph.backend(stage=3, compute=compute, **more)
        net.compile(backend=backend)
        for step in range(2):
            torch.manual_seed(step)
            ids = torch.randint(1, 67, (2, 9), generator=seeded(step))
            loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
        found.append((loss.item(), {name: full(p.grad) for name, p in net.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert backend._store.saved.bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "make", "compute"),
    [
        (1, _llama, "eager"),  # of six layers four are traced; keys are returned
        (2, _gpt2, "inductor"),  # with dropout
    ],
)
def test_models_of_transformers(world: int, make: Any, compute: str, tmp_path: Path) -> None:
    run(world, _of_transformers, str(tmp_path), make, compute, timeout=300)
