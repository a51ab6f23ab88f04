"""Training with what a device has no room for on the host: the cases that a CPU with a split memory is tested by
(tests/numerics/test_host_tier.py), on an accelerator, alone and as two gloo ranks that share it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.accelerator import on_it
from numerics import host_cases as cases
from numerics.test_offload import (
    Run,
    _accumulates_and_evaluates,
    adamw,
    groups,
    mastered,
    momentum,
    stock,
)
from ranks import RankFailure, run

import zerograph
from zerograph.core import slots
from zerograph.core.errors import ShardingError
from zerograph.runtime.offload.host import AcceleratorHost
from zerograph.runtime.torch_private import local_tensor


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "case", [cases.unusual, cases.alike_everywhere, cases.reads_gradients], ids=lambda c: c.__name__
)
def test_training_is_the_same(case: Callable[[], object], world_size: int) -> None:
    try:
        run(world_size, on_it, case)
    except RankFailure as failure:
        # It gathers parameters that are on the device, which ranks that share one have gloo for.
        if case is cases.unusual and world_size == 2 and "exit code -11" in str(failure):
            pytest.xfail("torch 2.11 ends the process where gloo gathers tensors on a GPU")
        raise


def _odd(offload: str) -> None:
    cases.odd(cases.on_host(offload))


@pytest.mark.parametrize("offload", ["gradients", "parameters"])
def test_odd_gradients_views_and_inference(offload: str) -> None:
    run(1, on_it, _odd, offload)


def test_checkpoints_load_at_either_tier(tmp_path: Path) -> None:
    run(2, on_it, cases.resumed, str(tmp_path / "checkpoint"))


def test_memory_for_gradients_is_used_again() -> None:
    run(1, on_it, cases.memory_of_gradients)


def _each_tier(dtype: torch.dtype | None) -> None:
    for make in (adamw, momentum, stock):
        trained = []
        for offload in ("optimizer", "gradients", "parameters"):
            training = Run(make, stage=3, dtype=dtype, **cases.on_host(offload))
            _accumulates_and_evaluates(training)
            weight = training.model.layers[0][0].weight
            assert weight.is_cpu and weight.grad is None
            assert all(state.is_cpu for state in training.optimizer.state[weight].values())
            trained.append(training.result())
        cases._same(trained[0], trained[1])
        cases._same(trained[0], trained[2])


@pytest.mark.parametrize(("world_size", "dtype"), [(1, None), (2, torch.bfloat16)], ids=["1", "2-bfloat16"])
def test_each_tier_gives_the_same_bits(world_size: int, dtype: torch.dtype | None) -> None:
    run(world_size, on_it, _each_tier, dtype)


UPDATES: list[tuple[Any, str, dict[str, Any]]] = [
    (adamw, "optimizer", {}),
    (groups, "parameters", {"dtype": torch.bfloat16}),
    (mastered, "optimizer", {"model_dtype": torch.bfloat16}),
]


def _on_the_device(make: Any, offload: str, options: dict[str, Any]) -> None:
    """Update there, through slots that hold a part of a parameter."""
    before, slots.SLOT = slots.SLOT, 2**14
    try:
        here, there = (
            Run(make, stage=3, update=update, **options, **cases.on_host(offload)) for update in ("host", "device")
        )
        for training in (here, there):
            _accumulates_and_evaluates(training)
    finally:
        slots.SLOT = before
    mine, its = here.result(), there.result()
    cases.close(torch.tensor(its[0]), torch.tensor(mine[0]))
    for name, value in its[1].items():
        cases.close(value.float(), mine[1][name].float())
    for key, state in its[2].items():
        assert "step" not in state or torch.equal(state["step"], mine[2][key]["step"])


@pytest.mark.parametrize(("make", "offload", "options"), UPDATES, ids=[make.__name__ for make, *_ in UPDATES])
def test_updates_on_the_device(make: Any, offload: str, options: dict[str, Any]) -> None:
    run(2, on_it, _on_the_device, make, offload, options)


def _activations(recompute: str) -> int:
    here, there = (Run(adamw, stage=3, recompute=recompute, **more) for more in ({}, {"activations": "host"}))
    for training in (here, there):
        _accumulates_and_evaluates(training)
    cases.close(torch.tensor(there.losses), torch.tensor(here.losses))
    values = here.result()[1]
    for name, value in there.result()[1].items():
        cases.close(value, values[name])
    return there.backend.report().on_host["activations"]


@pytest.mark.parametrize(("world_size", "recompute"), [(1, "auto"), (2, "full")])
def test_what_layers_save_waits_on_the_host(world_size: int, recompute: str) -> None:
    assert all(run(world_size, on_it, _activations, recompute))


def _moves() -> None:
    training = Run(adamw, stage=3, **cases.on_host())
    training.steps(1)
    weight = training.model.layers[0][0].weight
    before = local_tensor(weight).data_ptr()
    assert training.backend.report().on_host.keys() == {"parameters", "gradients"}
    assert training.model.to(Run.device).layers[0][0].weight is weight
    assert (weight.is_cpu, local_tensor(weight).data_ptr()) == (True, before)
    with pytest.raises(ShardingError, match="cannot move to cpu"):
        training.model.cpu()
    with zerograph.gathered(training.model) as model:
        assert {p.device.type for p in model.parameters()} == {Run.device.type}
        model(training.tokens())
    training.steps(1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_stays_on_the_device_it_computes_on(world_size: int) -> None:
    run(world_size, on_it, _moves)


def _built_on_meta() -> None:
    cases.built_on_meta(cases.on_host(), is_pinned=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_on_the_meta_device_is_made_on_the_host(world_size: int) -> None:
    run(world_size, on_it, _built_on_meta)


def _as_on_the_device(options: dict[str, Any]) -> int:
    here, there = Run(adamw, stage=3), Run(adamw, stage=3, tier="host", **options)
    for training in (here, there):
        _accumulates_and_evaluates(training)
    cases.close(torch.tensor(there.losses), torch.tensor(here.losses))
    values = here.result()[1]
    for name, value in there.result()[1].items():
        cases.close(value, values[name])
    return sum(p.is_cpu for p in there.model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_as_on_the_device(world_size: int) -> None:
    assert all(run(world_size, on_it, _as_on_the_device, {"offload": "parameters"}))


def test_what_a_search_moves_is_traced_again() -> None:
    """The search finds out after the first trace what has to leave."""
    assert all(run(1, on_it, _as_on_the_device, {"offload": "auto", "memory": "350KiB"}))


def test_a_search_chooses_where_states_are_updated() -> None:
    assert all(run(1, on_it, _as_on_the_device, {"offload": "auto", "memory": "350KiB", "update": "auto"}))


def _by_default_there() -> None:
    """``torch.set_default_device``, which says where the user's tensors are made, and none of the host's."""
    options = {"stage": 3, **cases.on_host()}
    expected = Run(adamw, **options)
    expected.steps(2)
    training = Run(adamw, **options)
    batches = [training.tokens() for _ in range(2)]
    with Run.device:
        assert AcceleratorHost(Run.device).room(8).is_pinned()
        for batch in batches:
            loss = training.compiled(batch)
            loss.backward()
            training.losses.append(loss.item())
            training.optimizer.step()
            training.optimizer.zero_grad()
    cases.close(torch.tensor(training.losses), torch.tensor(expected.losses))


def test_memory_of_the_host_is_there_where_the_default_device_is_another() -> None:
    run(1, on_it, _by_default_there)
