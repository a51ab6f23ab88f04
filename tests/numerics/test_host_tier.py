"""Training with what a device has no room for on the host, or on NVMe behind it, equals training without, to the bit.

Its host counts as a second memory (``Machine.split``): copies between the two are real and go on in a thread.
More optimizers and placements are in test_offload.py and test_random_plans.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from numerics.compare import full
from numerics.test_offload import (
    BEHIND,
    HOST,
    Net,
    Run,
    _accumulates_and_evaluates,
    _becomes_bfloat16,
    _changed_outside,
    _clipping_and_skipping,
    _rank,
    _same,
    _without_a_gradient,
    adamw,
    bf16_moments,
    groups,
    mastered,
    stock,
)
from ranks import RankFailure, run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import zerograph
from zerograph.core import slots
from zerograph.core.errors import ConfigError
from zerograph.core.plan import Homes
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.runtime import host
from zerograph.runtime.torch_private import local_tensor

BEYOND = {**HOST, "offload": "parameters"}


def beyond(tier: str, folder: Path) -> dict[str, Any]:
    """Options by which all that can leaves the device."""
    return BEYOND if tier == "host" else {**BEHIND, "offload": "parameters", "path": str(folder)}


tiers = pytest.mark.parametrize("tier", ["host", "nvme"])


class Odd(nn.Module):
    """Its gradients are slices of one tensor, and expanded; and it returns a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(6, n)) for n in (3, 5))
        self.shift = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, torch.cat([self.left, self.right], 1))
        return y.square().sum() + (y + self.shift).sum(), self.left[:2]


def _odd(away: dict[str, Any]) -> None:
    found = []
    for more in ({}, away):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Odd()
        backend = zerograph.backend(stage=3, compute="eager", **more)
        compiled, optimizer = torch.compile(model, backend=backend), adamw(model)
        for times in range(3):
            for held in ((False,), (True, False), (False, True, False))[times]:
                with backend.no_sync() if held else contextlib.nullcontext():
                    loss, view = compiled(torch.ones(4, 8))
                    loss.backward()
            kept = view.detach()
            before = kept.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.inference_mode():
                evaluated = compiled(torch.ones(2, 8).new_ones(4, 8))[0].item()
            assert torch.equal(kept, before) or not more
        found.append((evaluated, *(full(p.detach()) for p in model.parameters())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


@tiers
@pytest.mark.parametrize("offload", ["gradients", "parameters"])
def test_odd_gradients_views_and_inference(offload: str, tier: str, tmp_path: Path) -> None:
    run(1, _odd, beyond(tier, tmp_path) | {"offload": offload})


def _alike(trains: Callable[[Run], None], away: dict[str, Any], make: Any = adamw, **options: Any) -> None:
    """Train in one memory, and with everything ``away`` from the device."""
    here, there = (Run(make, **{"stage": 3, **options, **more}) for more in ({}, away))
    for training in (here, there):
        trains(training)
    _same(here.result(), there.result())


def _unusual_steps(training: Run) -> None:
    for trains in (_clipping_and_skipping, _changed_outside, _without_a_gradient, _becomes_bfloat16):
        trains(training)


UPDATES: list[tuple[Any, str, dict[str, Any]]] = [
    (groups, "parameters", {"dtype": torch.bfloat16}),
    (mastered, "optimizer", {"whole": torch.bfloat16}),
    (adamw, "optimizer", {}),
    (bf16_moments, "parameters", {}),
    (stock, "parameters", {"dtype": torch.bfloat16}),
]


def _on_the_device(trains: Callable[[Run], None], slot: int, make: Any, offload: str, options: dict[str, Any]) -> None:
    """Update on the device, through which states pass in slots of so many bytes."""
    before, slots.SLOT = slots.SLOT, slot
    try:
        _alike(trains, {**HOST, "offload": offload, "update": "device"}, make, **options)
    finally:
        slots.SLOT = before


@pytest.mark.parametrize(("make", "offload", "options"), UPDATES, ids=[make.__name__ for make, *_ in UPDATES])
def test_updates_on_the_device_are_the_same_to_the_bit(make: Any, offload: str, options: dict[str, Any]) -> None:
    run(2, _on_the_device, _accumulates_and_evaluates, 32 * 2**10, make, offload, options)


@pytest.mark.parametrize(("world_size", "slot"), [(1, 2**26), (4, 2**10)])
def test_unusual_steps_that_update_on_the_device(world_size: int, slot: int) -> None:
    run(world_size, _on_the_device, _unusual_steps, slot, adamw, "parameters", {"dtype": torch.bfloat16})


def _in_bfloat16(trains: Callable[[Run], None], away: dict[str, Any]) -> None:
    _alike(trains, away, dtype=torch.bfloat16)


@tiers
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_unusual_steps_are_the_same_to_the_bit(offload: str, tier: str, tmp_path: Path) -> None:
    run(2, _in_bfloat16, _unusual_steps, beyond(tier, tmp_path) | {"offload": offload})


@tiers
@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(world_size: int, tier: str, tmp_path: Path) -> None:
    run(world_size, _in_bfloat16, _accumulates_and_evaluates, beyond(tier, tmp_path))


def _gradients(training: Run) -> None:
    """Of all the ways to ask for a gradient; one that is kept is never written over."""
    training.steps(1)
    weight, other = training.model.layers[0][0].weight, training.model.layers[1][0].bias
    training.backward()
    kept, before = weight.grad, full(weight.grad).clone()
    training.optimizer.step()
    training.optimizer.zero_grad()
    hook = weight.register_hook(lambda grad: grad * 2)
    training.steps(1)
    hook.remove()
    assert torch.equal(full(kept), before)
    with training.backend.no_sync():
        training.backward()
    training.backward()
    loss = training.compiled(torch.randint(0, 37, (3, 8), generator=training.batches))
    found = torch.autograd.grad(loss, [weight, other])
    training.losses += [float(full(one).double().sum()) for one in found]
    training.steps(1)
    training.optimizer.zero_grad(set_to_none=False)
    training.steps(2)


@tiers
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_however_they_are_asked_for(world_size: int, tier: str, tmp_path: Path) -> None:
    run(world_size, _alike, _gradients, beyond(tier, tmp_path))


def _resumed(folder: str, away: dict[str, Any]) -> None:
    first = Run(groups, stage=3, dtype=torch.bfloat16, **away)
    first.steps(3)
    model, optimizer = get_state_dict(first.model, first.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    kept = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))

    def resumes(second: Run) -> None:
        second.steps(1)
        model, optimizer = get_state_dict(second.model, second.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        second.losses, second.batches = [], torch.Generator().manual_seed(99 + _rank())
        second.steps(2)
        second.model.load_state_dict(kept[0])
        second.optimizer.load_state_dict(copy.deepcopy(kept[1]))
        second.steps(2)

    _alike(resumes, away, groups, dtype=torch.bfloat16)


@tiers
def test_checkpoints_load_at_either_home(tier: str, tmp_path: Path) -> None:
    run(2, _resumed, str(tmp_path / "checkpoint"), beyond(tier, tmp_path))


def _memory_of_gradients() -> None:
    training = Run(adamw, stage=3, **BEYOND)
    training.steps(2)
    weight = training.model.layers[0][0].weight

    def address() -> int:
        training.backward()
        found = local_tensor(weight.grad).data_ptr()
        training.optimizer.zero_grad()
        return found

    first = address()
    assert address() == first
    training.backward()
    training.steps(1)  # to which it is added
    assert address() == address()


def test_memory_for_gradients_is_used_again() -> None:
    run(1, _memory_of_gradients)


def _planned(path: Path) -> None:
    """A plan in which each bucket has other homes."""
    options: dict[str, Any] = {"bucket_size": "20KiB", "prefetch": 1}

    def make() -> Any:
        return Net().train(), (torch.zeros(3, 8, dtype=torch.int64),)

    found = compile_only(make, world_size=2, stage=3, **BEYOND, **options)
    file = forecast_file("tests", found, HOST["machine"])
    ways = [Homes(), Homes(optimizer="host"), Homes("device", "host", "host"), Homes("host", "host", "host")]
    buckets = tuple(
        replace(b, homes=ways[i % len(ways)] if any(p.trainable for p in b.params) else Homes())
        for i, b in enumerate(file.plan.buckets)
    )
    path.write_text(replace(file, plan=replace(file.plan, buckets=buckets)).to_json())


def _replays(path: str) -> None:
    trained = []
    for options in ({"plan": path}, {"stage": 3}):
        training = Run(adamw, **options)
        _accumulates_and_evaluates(training)
        trained.append(training)
    assert 0 < len(trained[0].backend._store._on_host) < len(list(trained[0].model.parameters()))
    _same(*(training.result() for training in trained))


def test_a_plan_with_other_homes_for_each_bucket_is_replayed(tmp_path: Path) -> None:
    _planned(tmp_path / "plan.json")
    run(2, _replays, str(tmp_path / "plan.json"))


def _refused(options: dict[str, Any]) -> None:
    Run(adamw, stage=3, **options).backward()


def test_a_cpu_has_one_memory() -> None:
    with pytest.raises(RankFailure, match=r"nothing would leave it(?s:.*)tier=.nvme"):
        run(2, _refused, {"offload": "optimizer", "tier": "host"})


@pytest.mark.parametrize("options", [{}, {"offload": "optimizer", "path": "/tmp"}, {**BEHIND, "path": "/tmp"}])
def test_where_nothing_is_on_the_host_nothing_is_updated_from_there(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"nothing is kept on the host alone(?s:.*)tier=.host"):
        zerograph.backend(**options, update="device")


def _fails() -> str:
    training = Run(adamw, stage=3, **BEYOND)
    training.steps(1)
    with pytest.MonkeyPatch.context() as patch:
        if _rank() == 0:
            patch.setattr(host, "_copy", _no_room)
        with pytest.raises((MemoryError, zerograph.core.errors.RankError)) as caught:
            training.backward()
    return type(caught.value).__name__


def _no_room(*_: Any) -> None:
    raise MemoryError("no room")


def test_a_copy_that_fails_is_an_error_on_all_ranks() -> None:
    assert run(2, _fails, timeout=60) == ["MemoryError", "RankError"]
