"""Training with what a device has no room for on the host, or on NVMe behind it, equals training without, to the bit.

Its host counts as a second memory (``Machine.split``): copies between the two are real and go on in a thread.
More optimizers and placements are in test_offload.py and test_random_plans.py. What is there is kept by
``runtime/offload/hosted.py``, and moved by ``runtime/offload/host.py`` or ``runtime/testing/simulated_host.py``;
``optim/through_device.py`` updates on the device what is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.host_cases import (
    alike,
    alike_everywhere,
    memory_of_gradients,
    odd,
    on_host,
    reads_gradients,
    resumed,
    unusual,
    unusual_steps,
)
from numerics.test_offload import (
    BEHIND,
    HOST,
    Net,
    Run,
    _accumulates_and_evaluates,
    _rank,
    _same,
    adamw,
    bf16_moments,
    groups,
    mastered,
    stock,
)
from ranks import refused, run

import zerograph
from zerograph.core import slots
from zerograph.core.errors import ConfigError
from zerograph.core.plan import Placement
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.runtime.testing import simulated_host

BEYOND = {**HOST, "offload": "parameters"}


def beyond(tier: str, folder: Path) -> dict[str, Any]:
    """Options by which all that can leaves the device."""
    return BEYOND if tier == "host" else {**BEHIND, "offload": "parameters", "path": str(folder)}


@pytest.mark.parametrize(("offload", "tier"), [("gradients", "host"), ("parameters", "nvme")])
def test_odd_gradients_views_and_inference(offload: str, tier: str, tmp_path: Path) -> None:
    run(1, odd, beyond(tier, tmp_path) | {"offload": offload})


UPDATES: list[tuple[Any, str, dict[str, Any]]] = [
    (groups, "parameters", {"dtype": torch.bfloat16}),
    (mastered, "optimizer", {"model_dtype": torch.bfloat16}),
    (adamw, "optimizer", {}),
    (bf16_moments, "parameters", {}),
    (stock, "parameters", {"dtype": torch.bfloat16}),
]


def _on_the_device(trains: Callable[[Run], None], slot: int, make: Any, offload: str, options: dict[str, Any]) -> None:
    """Update on the device, through which states pass in slots of so many bytes."""
    before, slots.SLOT = slots.SLOT, slot
    try:
        alike(trains, {**HOST, "offload": offload, "update": "device"}, make, **options)
    finally:
        slots.SLOT = before


@pytest.mark.parametrize(("make", "offload", "options"), UPDATES, ids=[make.__name__ for make, *_ in UPDATES])
def test_updates_on_the_device_are_the_same_to_the_bit(make: Any, offload: str, options: dict[str, Any]) -> None:
    run(2, _on_the_device, _accumulates_and_evaluates, 32 * 2**10, make, offload, options)


@pytest.mark.parametrize(("world_size", "slot"), [(1, 2**26), (4, 2**12)])
def test_unusual_steps_that_update_on_the_device(world_size: int, slot: int) -> None:
    run(world_size, _on_the_device, unusual_steps, slot, adamw, "parameters", {"dtype": torch.bfloat16})


def _counted() -> list[float]:
    """The count of each parameter's updates."""
    model = torch.nn.Linear(8, 5)  # of whose rows the last of four ranks has none
    compiled = torch.compile(model, backend=zerograph.backend(stage=3, compute="eager", update="device", **HOST))
    optimizer = zerograph.optim.AdamW(model.parameters())
    for _ in range(2):
        compiled(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(optimizer.state[param]["step"]) for param in model.parameters()]


def test_updates_on_the_device_are_counted_by_ranks_without_rows_too() -> None:
    """A checkpoint may have the count of any rank."""
    assert run(4, _counted) == [[2.0, 2.0]] * 4


@pytest.mark.parametrize(("offload", "tier"), [("optimizer", "host"), ("parameters", "nvme")])
def test_unusual_steps_are_the_same_to_the_bit(offload: str, tier: str, tmp_path: Path) -> None:
    run(2, unusual, beyond(tier, tmp_path) | {"offload": offload})


@pytest.mark.parametrize(("world_size", "tier"), [(1, "nvme"), (4, "host")])
def test_other_world_sizes(world_size: int, tier: str, tmp_path: Path) -> None:
    run(world_size, alike_everywhere, beyond(tier, tmp_path))


@pytest.mark.parametrize(("world_size", "tier"), [(1, "nvme"), (2, "host")])
def test_gradients_however_they_are_asked_for(world_size: int, tier: str, tmp_path: Path) -> None:
    run(world_size, reads_gradients, beyond(tier, tmp_path))


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_checkpoints_load_at_either_tier(tier: str, tmp_path: Path) -> None:
    run(2, resumed, str(tmp_path / "checkpoint"), beyond(tier, tmp_path))


def test_memory_for_gradients_is_used_again() -> None:
    run(1, memory_of_gradients)


def _planned(path: Path) -> None:
    """A plan in which each bucket has another placement."""
    options: dict[str, Any] = {"bucket_size": "20KiB", "prefetch": 1}

    def make() -> Any:
        return Net().train(), (torch.zeros(3, 8, dtype=torch.int64),)

    found = compile_only(make, world_size=2, stage=3, **on_host(), **options)
    file = forecast_file("tests", found, HOST["machine"])
    ways = [
        Placement(),
        Placement(optimizer="host"),
        Placement("device", "host", "host"),
        Placement("host", "host", "host"),
    ]
    buckets = tuple(
        replace(b, placement=ways[i % len(ways)] if any(p.trainable for p in b.params) else Placement())
        for i, b in enumerate(file.plan.buckets)
    )
    path.write_text(replace(file, plan=replace(file.plan, buckets=buckets)).to_json())


def _replays(path: str) -> None:
    trained = []
    for options in ({"plan": path}, {"stage": 3}):
        training = Run(adamw, **options)
        _accumulates_and_evaluates(training)
        trained.append(training)
    assert 0 < len(trained[0].backend._store.locations.on_host) < len(list(trained[0].model.parameters()))
    _same(*(training.result() for training in trained))


def test_a_plan_with_other_placements_for_each_bucket_is_replayed(tmp_path: Path) -> None:
    _planned(tmp_path / "plan.json")
    run(2, _replays, str(tmp_path / "plan.json"))


def _refused(options: dict[str, Any]) -> None:
    Run(adamw, stage=3, **options).backward()


def test_a_cpu_has_one_memory() -> None:
    for text in run(2, refused, _refused, {"offload": "optimizer", "tier": "host"}):
        assert re.search(r"nothing would leave it(?s:.*)tier=.nvme", text), text


@pytest.mark.parametrize("options", [{}, {"offload": "optimizer", "path": "/tmp"}, {**BEHIND, "path": "/tmp"}])
def test_where_nothing_is_on_the_host_nothing_is_updated_from_there(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"nothing is kept on the host alone(?s:.*)tier=.host"):
        zerograph.backend(**options, update="device")


def _fails() -> str:
    training = Run(adamw, stage=3, **on_host())
    training.steps(1)
    with pytest.MonkeyPatch.context() as patch:
        if _rank() == 0:
            patch.setattr(simulated_host, "_copy", _no_room)
        with pytest.raises((MemoryError, zerograph.core.errors.RankError)) as caught:
            training.backward()
    return type(caught.value).__name__


def _no_room(*_: Any) -> None:
    raise MemoryError("no room")


def test_a_copy_that_fails_is_an_error_on_all_ranks() -> None:
    assert run(2, _fails, timeout=60) == ["MemoryError", "RankError"]
