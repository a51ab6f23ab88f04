"""Training whose gathers and reductions travel in fewer bits."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.test_offload import Run, adamw
from ranks import run
from taken_hosts import on_hosts
from torch.distributed.device_mesh import init_device_mesh

import zerograph
from zerograph.core.errors import ConfigError, ZeroGraphError

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSSY = {"gather_wire": "int8", "reduce_wire": "int8"}


def _over_hosts(options: list[dict[str, Any]]) -> list[Run]:
    """The same training by several plans, on two hosts."""
    found = []
    for each in options:
        with on_hosts(lambda rank: rank // max(1, dist.get_world_size() // 2)):
            training = Run(adamw, **each)
            zerograph.shard(training.model, training.backend)
        training.steps(4)
        found.append(training)
    return found


def _alike(folder: Path) -> None:
    """Rows of a parameter, and so blocks, are the same at stages 1 to 3 and wherever shards lie."""
    off = {"offload": "parameters", "path": str(folder), "nvme": "8MiB"}
    exact, *wired = _over_hosts([{"stage": 3}, *({"stage": stage, **LOSSY} for stage in (1, 2, 3)), off | LOSSY])
    losses, values, _ = wired[0].result()
    assert losses == pytest.approx(exact.losses, rel=0.02)
    assert losses != exact.losses
    for other in wired[1:]:
        again = other.result()
        assert again[0] == losses
        assert all(torch.equal(value, values[name]) for name, value in again[1].items())
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: value.sum().item() for name, value in values.items()})
    assert all(one == every[0] for one in every)


def test_stages_and_placements_agree_to_the_bit(tmp_path: Path) -> None:
    run(4, _alike, tmp_path)


def _anyhow() -> None:
    """Whole gradients at stage 0, tiles, gradients that wait, and an infinity in one of them on one rank."""
    whole, tiled = {"stage": 0, "reduce_wire": "int8"}, {"tile": {"layers.*.weight": 2}, **LOSSY}
    exact, *others = _over_hosts([{"stage": 3}, whole, tiled])
    for training in others:
        assert training.losses == pytest.approx(exact.losses, rel=0.02)
        with training.backend.no_sync():
            training.backward()
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        before = training.result()[1]
        training.backward(math.inf if dist.get_rank() == 1 else 1.0)
        training.optimizer.step()  # skips
        assert all(torch.equal(value, before[name]) for name, value in training.result()[1].items())


def test_stage_0_tiles_accumulation_and_overflow() -> None:
    run(4, _anyhow)


def _loss_of_300_steps(gather: str | None, reduce: str | None) -> float:
    """The mean training loss of the last hundred, of the demo's GPT in small on its text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("ZEROGRAPH_TRANSPORT", "group")
        gpt, text = importlib.import_module("gpt"), importlib.import_module("text")
        torch.manual_seed(0)
        model = gpt.GPT(gpt.Config(context=32, layers=2, heads=2, width=64))
        backend = zerograph.backend(gather_wire=gather, reduce_wire=reduce, compute="eager")
        model.compile(backend=backend)
        zerograph.shard(model, backend)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), list[float]()
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    for x, y in text.batches(text.load()[0], 300, 16, 32, seed=dist.get_rank()):
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    mean = torch.tensor(sum(losses[-100:]) / 100)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@functools.cache
def _exact() -> float:
    return run(2, _loss_of_300_steps, None, None)[0]


@pytest.mark.costly
@pytest.mark.parametrize(("gather", "reduce"), [("int8", "int4"), ("fp8", "int8")])
def test_300_steps_lose_less_than_two_hundredths(gather: str | None, reduce: str | None) -> None:
    assert _exact() < 3.0  # of log 256 = 5.5 in the beginning
    # `benchmarks/wires.py` measures the demo's own model.
    assert run(2, _loss_of_300_steps, gather, reduce)[0] == pytest.approx(_exact(), rel=0.02)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gather_wire": "int4"}, "gather_wire must be one of"),
        ({"reduce_wire": "fp8"}, "reduce_wire must be one of"),
        ({"gather_wire": "int8", "stage": 0}, "gathers nothing"),
    ],
)
def test_what_no_wire_can_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        zerograph.backend(**options)


def _differ() -> str:
    with pytest.raises(ZeroGraphError) as caught:
        Run(adamw, stage=3, gather_wire="int8" if dist.get_rank() == 0 else None).backward()
    return str(caught.value)


def test_ranks_with_other_wires_are_told() -> None:
    assert all("gather_wire" in text for text in run(2, _differ))


def _over_replicas() -> None:
    exact, between, alone = (
        Run(adamw, stage=3, mesh=init_device_mesh("cpu", sizes), **wires)
        for sizes, wires in (((2, 2), {}), ((2, 2), {"reduce_wire": "int8"}), ((4, 1), {"reduce_wire": "int8"}))
    )
    for training in (exact, between, alone):
        training.steps(3)
    for training in (between, alone):
        losses, values, _ = training.result()
        assert losses == pytest.approx(exact.losses, rel=0.02)
        assert losses != exact.losses
        sums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sums, [value.double().sum().item() for value in values.values()])
        assert all(one == sums[0] for one in sums)


def test_replicas_stay_equal() -> None:
    """Between hosts, of which each rank takes itself for one: in shared memory nothing is sent."""
    run(4, _on_own_hosts, _over_replicas)


def _on_own_hosts(work: Callable[[], None]) -> None:
    with on_hosts(lambda rank: rank):
        work()
