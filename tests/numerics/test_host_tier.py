"""Training with what a device has no room for on the host equals training without, to the bit.

On a CPU whose host counts as a second memory (``Machine.split``): copies between the two are real and go on in a
thread.
More optimizers and placements are in test_offload.py.
"""

from __future__ import annotations

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
    HOST,
    Run,
    _accumulates_and_evaluates,
    _becomes_bfloat16,
    _changed_outside,
    _clipping_and_skipping,
    _rank,
    _same,
    _without_a_gradient,
    adamw,
    groups,
)
from ranks import RankFailure, run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerograph
from zerograph.core.machine import machine_named
from zerograph.core.plan import Homes
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.runtime.torch_private import local_tensor

BEYOND = {**HOST, "offload": "parameters"}


def _alike(trains: Callable[[Run], None], make: Any = adamw, **options: Any) -> Run:
    """Train in one memory, and with everything on the host; returns the latter."""
    here, host = (Run(make, **{"stage": 3, **options, **more}) for more in ({}, BEYOND))
    for training in (here, host):
        trains(training)
    _same(here.result(), host.result())
    return host


def _unusual_steps(training: Run) -> None:
    for trains in (_clipping_and_skipping, _changed_outside, _without_a_gradient, _becomes_bfloat16):
        trains(training)


def _unusual() -> None:
    _alike(_unusual_steps, dtype=torch.bfloat16)


def test_unusual_steps_are_the_same_to_the_bit() -> None:
    run(2, _unusual)


@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(world_size: int) -> None:
    run(world_size, _alike_everywhere)


def _alike_everywhere() -> None:
    _alike(_accumulates_and_evaluates, dtype=torch.bfloat16)


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


def _asks_for_gradients() -> None:
    _alike(_gradients)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_however_they_are_asked_for(world_size: int) -> None:
    run(world_size, _asks_for_gradients)


def _resumed(folder: str) -> None:
    first = Run(groups, stage=3, dtype=torch.bfloat16, **BEYOND)
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

    _alike(resumes, groups, dtype=torch.bfloat16)


def test_checkpoints_load_at_either_home(tmp_path: Path) -> None:
    run(2, _resumed, str(tmp_path / "checkpoint"))


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
        from numerics.test_offload import Net

        return Net().train(), (torch.zeros(3, 8, dtype=torch.int64),)

    machine = replace(machine_named("cpu"), split=True)
    found = compile_only(make, world_size=2, stage=3, **{**BEYOND, "machine": machine}, **options)
    file = forecast_file("tests", found, machine)
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


def _fails() -> str:
    training = Run(adamw, stage=3, **BEYOND)
    training.steps(1)
    if _rank() == 0:
        host = training.backend._store.host
        assert host is not None

        def fails(*_: Any) -> None:
            raise MemoryError("no room")

        host.start = fails  # type: ignore[method-assign]
    with pytest.raises((MemoryError, zerograph.core.errors.RankError)) as caught:
        training.backward()
    return type(caught.value).__name__


def test_a_copy_that_fails_is_an_error_on_all_ranks() -> None:
    assert run(2, _fails, timeout=60) == ["MemoryError", "RankError"]
