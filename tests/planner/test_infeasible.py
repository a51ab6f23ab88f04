"""A step that fits no plan: the error says what is missing, when, and what would help."""

from __future__ import annotations

import pytest
from planner.steps import Layer, step_of

from zerograph.machine import Tier, machine_named
from zerograph.planner.infeasible import infeasible
from zerograph.planner.search import Search, Wish, over

MACHINE = machine_named("h100-80gb")


def test_need_have_moment_tensor_and_knobs() -> None:
    step = step_of([Layer(rows=2**20, stream=2**20, inside=2**26, flops=10**9)] * 8)
    search = Search(step, Wish(1, 4, bucket_size=2**26, prefetch=4, recompute="none"), MACHINE)
    error = infeasible(search, step, MACHINE, 300 * 2**20)
    first, second = str(error).split("\n\n")[0].splitlines()
    assert first.startswith("the step needs 1.")
    assert "may use 300 MiB" in first
    assert second.startswith("most is held in backward blocks.7 (model.py:8): 24 MiB of shards and optimizer states, ")
    assert "(model.py:8) and what lives as long" in second
    assert 'recompute="full": ' in error.hint
    assert "then it fits" in error.hint
    assert "world size 8: 12 MiB less" in error.hint
    assert error.hint.endswith(" more memory")


def test_states_alone_may_be_too_much() -> None:
    step = step_of([Layer(rows=2**20, stream=1024, inside=4096)] * 4)
    search = Search(step, Wish("auto", 4), MACHINE)
    error = infeasible(search, step, MACHINE, 2**20)
    assert "MiB of shards and optimizer states" in str(error)
    assert "world size 8" in error.hint


def test_knobs_are_offload_nvme_and_tiles_too() -> None:
    step = step_of([Layer(rows=2**24, stream=2**10, inside=2**10, flops=10**9)] * 4)  # 64 MiB each when whole
    search = Search(step, Wish(3, 8, bucket_size=2**23, prefetch=0), MACHINE)
    error = infeasible(search, step, MACHINE, 150 * 2**20)
    assert "of device memory per rank at least and may use 150 MiB" in str(error)
    knobs = error.hint.removeprefix("what would help: ").split("; ")
    fitting = [knob for knob in knobs if knob.endswith("then it fits")]
    assert any(knob.startswith("tiling of large operators (can be planned, not run yet): ") for knob in fitting)
    alone = [knob for knob in knobs if knob.startswith('offload="parameters", tier="nvme" (can be planned')]
    assert len(alone) == 1 and " less, " in alone[0]


@pytest.mark.parametrize(("tier", "kind"), [("host", "master copy and states"), ("nvme", "master copy and states")])
def test_every_tier_may_be_the_short_one(tier: Tier, kind: str) -> None:
    step = step_of([Layer(rows=2**24)] * 4)
    wish = Wish("auto", 8, bucket_size=2**26, offload="parameters", tier=tier)
    search = Search(step, wish, MACHINE)
    budget: dict[Tier, int] = {"device": 80 * 10**9, "host": 10**9, "nvme": 10**9} | {tier: 10 * 2**20}
    error = infeasible(search, step, MACHINE, budget)
    first, second = str(error).split("\n\n")[0].splitlines()
    assert f"of {tier} memory per rank at least and may use 10 MiB" in first
    assert "of optimizer states" in second and f"the largest is {kind} of blocks." in second
    other = "nvme" if tier == "host" else "host"
    assert f'offload="optimizer", tier="{other}" (can be planned, not run yet): ' in error.hint
    assert f"more {tier} memory" in error.hint


def test_what_is_needed_of_a_tier_is_what_the_formulas_say() -> None:
    step = step_of([Layer(rows=2**24)] * 4)
    search = Search(step, Wish("auto", 8, bucket_size=2**26, offload="parameters", tier="nvme"), MACHINE)
    error = infeasible(search, step, MACHINE, {"device": 80 * 10**9, "host": 10**9, "nvme": 0})
    assert "needs 160 MiB of nvme memory" in str(error)  # 64 M parameters of 4 + 4 + 4 + 8 bytes over 8 ranks


def test_the_search_names_the_plan_that_is_least_over() -> None:
    step = step_of([Layer(rows=2**24)] * 4)
    search = Search(step, Wish("auto", 8, offload="auto"), MACHINE)
    budget: dict[Tier, int] = {"device": 2**20, "host": 2**20, "nvme": 2**20}
    assert search.within(budget) is None
    least = over(search.closest(budget), budget)
    assert all(least <= over(c, budget) for c in search.best)
