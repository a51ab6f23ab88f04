"""The largest size that fits a machine: found on a few traces, and reported with what keeps it from being larger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import MLP, Halving, Padded, ids
from planner.steps import Layer, step_of
from torch import nn

from zerograph.core.errors import ConfigError, InfeasibleError
from zerograph.core.machine import machine_named
from zerograph.core.step import Dimension
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.largest_fit import Probe, describe_answer, largest_by_stage, largest_file
from zerograph.dryrun.traced_steps import Steps
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.largest_size import LargestSize
from zerograph.planner.search.search import Search

pytestmark = pytest.mark.costly

GPU, WORLD, MIB = machine_named("h100-80gb"), 4, 2**20


def mlp() -> Any:
    return MLP(), (torch.zeros(8, 16), torch.zeros(8, 4))


@pytest.mark.parametrize(("model", "what"), [(Padded, "seq"), (Halving, "batch"), (Halving, "seq")])
def test_the_largest_fits_as_traced_and_the_next_does_not(model: type[nn.Module], what: Dimension) -> None:
    """Of a model that goes two ways by its sequence, and of one whose sizes are quotients."""
    budget = 4 * MIB

    def make() -> Any:
        return model(), ids(2, 16)

    plans = Probe(Steps(make, what, world=WORLD, batch=1, seq=1), GPU, Constraints(3, WORLD))
    found = plans.largest(budget)

    def searched(size: int) -> Search:
        step = compile_only(make, world_size=WORLD, sizes={what: size}, programs=False).frame.step
        return Search(step, plans.constraints, GPU, states=plans.steps.states)

    assert searched(found.value).within(budget) is not None
    assert searched(found.value + 1).within(budget) is None


@pytest.mark.slow
def test_stages_that_shard_share_their_traces_and_shard_more_to_fit_more() -> None:
    machine = GPU.with_memory(MIB)
    found = largest_by_stage(mlp, "batch", machine, [1, 2, 3], reserve=0.1, world=WORLD, batch=1, seq=1)
    sizes = [filled.value for filled, _ in found.values()]
    assert list(found) == [1, 2, 3] and 1 < sizes[0] <= sizes[1] <= sizes[2]
    assert {budget for _, budget in found.values()} == {int(0.9 * MIB)}


def test_a_share_of_every_tier_is_held_back() -> None:
    for tier, size in GPU.budget(WORLD, 0.25).items():
        assert size == int(0.75 * GPU.capacity(tier, WORLD))


def test_what_communicators_of_replicas_take_is_left_out() -> None:
    machine = replace(GPU, device_memory=MIB, context=0, communicator=MIB // 4)
    file = largest_file("mlp", mlp, machine, "batch", replicas=2).file
    assert file.forecast.peaks["device"].bytes <= file.budget["device"] == MIB // 2


def test_where_not_even_one_fits_it_is_said_what_is_missing() -> None:
    with pytest.raises(InfeasibleError, match="device memory"):
        largest_file("mlp", mlp, GPU.with_memory(4096), "batch")


@pytest.mark.parametrize("options", [{"stage": 0, "offload": "optimizer"}, {"offload": "all", "tier": "tape"}], ids=str)
def test_what_cannot_be_offloaded_is_refused_before_anything_is_traced(options: dict[str, Any]) -> None:
    def make() -> Any:
        raise AssertionError("traced")

    with pytest.raises(ConfigError):
        largest_file("model", make, GPU, "seq", world=2, **options)


def test_the_answer_says_what_the_next_size_needs_or_why_there_is_none() -> None:
    search = Search(step_of([Layer()]), Constraints(3, WORLD), GPU)
    filled = LargestSize(7, search, 3 * MIB, "", 8, "host")
    assert describe_answer("batch", filled, {"device": MIB, "host": 2 * MIB}) == (
        "largest batch: 7; 8 needs 3 MiB of host memory per rank, of 2 MiB"
    )
    assert describe_answer("seq", replace(filled, tier="device"), MIB) == (
        "largest seq: 7; 8 needs 3 MiB of device memory per rank, of 1 MiB"
    )
    ended = LargestSize(128, search, None, "at seq 129 the model raises")
    assert describe_answer("seq", ended, MIB) == "largest seq: 128; at seq 129 the model raises"
