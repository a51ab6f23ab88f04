"""Plans that a backend searches with offload train to the bit as in memory, within what they may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.test_offload import HOST, Run, _accumulates_and_evaluates, _rank, _same, adamw
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.core import slots
from zerograph.core.errors import ConfigError, InfeasibleError
from zerograph.core.executable import missing, tiers_run
from zerograph.core.machine import DISKS, Machine, Tier, machine_named
from zerograph.core.step import Step
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.runtime.offload import slots as slots_of_states


def _small_slots() -> None:
    """So small that a bucket that leaves frees more than they take."""
    slots.SLOT = slots_of_states.SLOT = 2**16


@pytest.fixture(autouse=True)
def _slot() -> Iterator[None]:
    before = slots.SLOT
    yield
    slots.SLOT = slots_of_states.SLOT = before


def _tight(step: Step, machine: Machine, runs: tuple[Tier, ...]) -> dict[str, int]:
    """Memory in which some buckets have to leave, and not all alike, to all tiers that there are."""
    constraints = Constraints("auto", 2, bucket_size=20 * 2**10, offload="auto", executable=runs)
    search = Search(step, constraints, machine)
    for device, host in sorted({(c.peaks[0], c.peaks[1]) for c in search.best}, key=sum):
        fastest = search.within({**machine.budget(2), "device": device, "host": host})
        placements = {bucket.placement for bucket in fastest.plan.buckets} if fastest is not None else set()
        if len(placements) > 1 and {tier for each in placements for tier in each.offload_tiers} == {*runs}:
            least = {"memory": device, "host_memory": host} if "host" in runs else {"memory": device}
            return {name: int(size / (1 - RESERVE)) + 1 for name, size in least.items()}
    raise AssertionError("no such memory")


def _as_in_memory(folder: str) -> None:
    _small_slots()
    plain = Run(adamw, stage=3)
    _accumulates_and_evaluates(plain)
    step = next(frame.step for frame in plain.backend.frames if frame.step.training)
    cpu, split = machine_named("cpu"), replace(machine_named("cpu"), split=True)
    for machine, more in ((cpu, {"path": folder}), (split, {}), (split, {"path": folder})):
        runs = tiers_run(machine, DISKS if "path" in more else ())
        tight = _tight(step, machine, runs)
        offloaded = Run(adamw, stage="auto", offload="auto", machine=machine, **tight, **more)
        _accumulates_and_evaluates(offloaded)
        _same(offloaded.result(), plain.result())
        plan = offloaded.backend.plan
        assert len({bucket.placement for bucket in plan.buckets}) > 1 and not missing(plan, runs)
        assert {tier for bucket in plan.buckets for tier in bucket.placement.offload_tiers} == {*runs}
        assert ("optimizer states" in offloaded.backend._store.bytes()) is ("path" in more)


def test_a_searched_plan_trains_as_in_memory(tmp_path: Path) -> None:
    run(2, _as_in_memory, str(tmp_path))


class Deep(nn.Sequential):
    """Shards that are many times what a step needs at a time."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128) for _ in range(24)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x).relu()
        return x.square().mean()


def _deep(**options: Any) -> tuple[list[float], zerograph.Backend, int]:
    """Losses of a few steps from the meta device on, and bytes that parameters began with on NVMe."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Deep()
    backend = zerograph.backend(compute="eager", bucket_size="64KiB", machine="cpu", **options)
    zerograph.shard(model, backend)
    zerograph.materialize(model)
    early = sum(extent.bytes for extent in backend._store.early._extents.values())
    model.compile(backend=backend)
    optimizer, losses = adamw(model), []
    for seed in range(3):
        loss = model(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, backend, early


def _materialized(folder: str) -> None:
    _small_slots()
    auto: dict[str, Any] = {"offload": "auto", "path": folder}
    plain, roomy, early = _deep(**auto, memory="1GiB")
    assert early == 0 and not roomy._store.bytes()
    size = sum(p.numel() * 4 for p in roomy._adoption.params.values())
    losses, tight, early = _deep(**auto, memory=size)
    assert losses == plain and early >= size
    assert {bucket.placement.parameters for bucket in tight.plan.buckets} == {
        "nvme"
    } and not tight._store.early._extents


@pytest.mark.slow
def test_what_memory_cannot_hold_is_materialized_on_nvme(tmp_path: Path) -> None:
    run(1, _materialized, str(tmp_path))


def _nothing_fits(folder: str) -> list[str]:
    """Errors of all ranks alike, before anything has left."""
    said = []
    on_nvme = {"offload": "parameters", "path": folder}
    for options in (
        {**on_nvme, "memory": "64KiB"},
        {**on_nvme, "memory": "1GiB", "nvme": "64KiB"},
        {**on_nvme, "nvme": "64KiB" if _rank() else "64MiB"},
        {**HOST, "offload": "parameters", "host_memory": "64KiB" if _rank() else "64MiB"},
        {**HOST, "offload": "auto", "memory": "180KiB", "host_memory": "16KiB" if _rank() else "64MiB", "tier": "host"},
    ):
        training = Run(adamw, stage=3, **options)  # type: ignore[arg-type]
        with pytest.raises(InfeasibleError) as caught:
            training.steps(1)
        assert training.backend._store.room.opened is None
        said.append(str(caught.value))
    return said


def test_a_plan_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    device, nvme, messages, host, searched = zip(*run(2, _nothing_fits, str(tmp_path), timeout=120), strict=True)
    for text in device:
        assert "of device memory per rank at least and may use 60.2 KiB" in text and "what would help" in text
    for text in nvme:
        assert "of nvme memory per rank" in text and "may use 60.2 KiB" in text and "more nvme memory" in text
    for text in messages:
        assert "on NVMe per rank" in text and "of optimizer states" in text and "hint: give each rank nvme=" in text
    for text in host:
        assert "on the host per rank" in text and "of gradients" in text and "hint: give each rank host_memory=" in text
    for text in searched:
        assert "of host memory per rank" in text


def test_a_cpu_needs_to_be_given_its_memory(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=zerograph.backend(offload="auto", path=tmp_path))
    with pytest.raises(ConfigError, match='offload="auto" on cpu needs to be told how much memory'):
        compiled(torch.zeros(1, 4))
