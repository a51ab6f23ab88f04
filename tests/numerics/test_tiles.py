"""Parameters of linear layers in tiles: outputs as of whole ones to the bit, and trainings as close as sums allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import full_values, mean_over_ranks
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.core.machine import machine_named
from zerograph.core.plan import Homes
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file

SPLIT = replace(machine_named("cpu"), split=True)


class Net(nn.Module):
    """Linear layers with a bias and without, of rows that ranks and tiles do not divide, used twice, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 70), nn.Linear(70, 24, bias=False)
        self.twice = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 26).requires_grad_(False)
        self.head = nn.Linear(26, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(torch.nn.functional.gelu(self.up(x)))
        h = self.twice(torch.tanh(self.twice(h)))
        return self.head(torch.tanh(self.frozen(h)))


def planned(path: Path, world_size: int, tiles: int, homes: Homes = Homes(), **options: Any) -> Path:  # noqa: B008
    """A plan file in which every parameter that can be is in so many tiles."""

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return Net().train(), (torch.zeros(2, 5, 24),)

    machine = SPLIT if "host" in homes.away else machine_named("cpu")
    away = {"offload": "parameters", "tier": "nvme", "path": str(path.parent), "machine": machine} if homes.away else {}
    found = compile_only(make, world_size=world_size, bucket_size=4, **away, **options)
    file = forecast_file("tests", found, machine)
    buckets = []
    for bucket in file.plan.buckets:
        (param,) = bucket.params
        trains = param.trainable or homes.parameters != "device"
        tiled = tiles if param.name in found.frame.step.tilable else 1
        own = homes if trains else Homes()
        buckets.append(replace(bucket, tiles=min(tiled, param.chunk_rows(world_size)), homes=own))
    assert sum(bucket.tiles > 1 for bucket in buckets) == 5 * (tiles > 1)
    path.write_text(replace(file, plan=replace(file.plan, buckets=tuple(buckets))).to_json())
    return path


class Training:
    """One that can be looked at in between."""

    def __init__(self, plan: Path, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Net()
        self.backend = zerograph.backend(plan=plan, **{"compute": "eager"} | options)
        self.compiled = torch.compile(self.model, backend=self.backend)
        self.optimizer = zerograph.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.losses: list[float] = []

    def backward(self, seed: int, rows: int = 2) -> None:
        """Of a batch of this rank's own."""
        generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
        loss = self.compiled(torch.randn(rows, 5, 24, generator=generator)).square().mean()
        loss.backward()
        self.losses.append(mean_over_ranks(loss).item())

    def steps(self, count: int) -> None:
        """Train on that many batches."""
        for seed in range(count):
            self.backward(seed)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluated(self) -> Tensor:
        """Outputs for one batch."""
        with torch.no_grad():
            return self.compiled(torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(7))).clone()

    def result(self) -> tuple[list[float], dict[str, Tensor], Tensor]:
        """Losses, parameters, and outputs of an evaluation."""
        return self.losses, full_values(self.model), self.evaluated()


def _trained(plan: Path, count: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Tensor, Tensor]:
    training = Training(plan, **options)
    before = training.evaluated()
    training.steps(count)
    return *training.result(), before


def _tiled_and_whole(tiled: Path, whole: Path, count: int, options: dict[str, Any]) -> None:
    losses, values, after, before = _trained(tiled, count, options)
    expected, truth, last, first = _trained(whole, count, options)
    torch.testing.assert_close(before, first, rtol=1e-6, atol=1e-6)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in truth.items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world_size", "compute"), [(2, "eager"), (2, "inductor"), (4, "eager")])
def test_tiles_train_as_whole_parameters(world_size: int, compute: str, tmp_path: Path) -> None:
    tiled = planned(tmp_path / "tiled.json", world_size, 3)
    whole = planned(tmp_path / "whole.json", world_size, 1)
    run(world_size, _tiled_and_whole, tiled, whole, 20, {"compute": compute})


NVME, HOST = Homes("nvme", "nvme", "nvme"), Homes("host", "host", "host")


def _equal(plans: list[tuple[Path, dict[str, Any]]], count: int) -> list[float]:
    """Trainings that are the same to the bit; returns the losses."""
    losses, values, after, before = _trained(*plans[0][:1], count, plans[0][1])
    for plan, options in plans[1:]:
        found = _trained(plan, count, options)
        assert found[0] == losses
        assert torch.equal(found[2], after) and torch.equal(found[3], before)
        assert found[1].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(found[1][name], value), name
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_tiles_train_alike_wherever_they_live(world_size: int, tmp_path: Path) -> None:
    there = {"path": str(tmp_path), "nvme": "8MiB"}
    homes = {"nvme": (NVME, there), "host": (HOST, {}), "behind": (Homes("host", "nvme", "nvme"), there)}
    homes |= {"here": (Homes(), {})} if world_size > 1 else {}  # a lone rank has nothing to gather in memory
    plans = [(planned(tmp_path / f"{n}.json", world_size, 3, h), more) for n, (h, more) in homes.items()]
    whole = planned(tmp_path / "whole.json", world_size, 1, NVME)
    found = run(world_size, _equal, plans, 4)
    run(world_size, _tiled_and_whole, plans[0][0], whole, 4, there)
    assert all(losses == found[0] for losses in found)
