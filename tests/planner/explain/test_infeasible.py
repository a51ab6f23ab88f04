"""A step that fits no plan: the error says what is missing, when, and what would help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, of_kinds, step_of, transformer
from quick import examples

from zerograph.core.machine import TIERS, Tier, machine_named
from zerograph.core.step import Step, TokenRegion
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.synthetic import gpt
from zerograph.planner.estimate.training import Training
from zerograph.planner.explain.infeasible import changes, infeasible
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import limits

MACHINE = machine_named("h100-80gb")


def test_need_have_moment_tensor_and_remedies() -> None:
    step = step_of([Layer(rows=2**20, stream=2**20, inside=2**26, flops=10**9)] * 8)
    search = Search(step, Constraints(1, 4, bucket_size=2**26, prefetch=4, recompute="none"), MACHINE)
    error = infeasible(search, step, MACHINE, 300 * 2**20)
    first, second = str(error).split("\n\n")[0].splitlines()
    assert first.startswith("the step needs 1.")
    assert "may use 300 MiB" in first
    assert second.startswith("most is held in backward blocks.7 (model.py:8): 1.01 GiB of activations, ")
    assert re.search(r" of optimizer states.*; the largest is up7 with [\d.]+ MiB \(model\.py:8\)$", second)
    assert 'recompute="full": ' in error.hint
    assert "then it fits" in error.hint
    assert "world size 8: 12 MiB less" in error.hint
    assert error.hint.endswith(" more memory")


def test_states_alone_may_be_too_much() -> None:
    step = step_of([Layer(rows=2**20, stream=1024, inside=4096)] * 4)
    search = Search(step, Constraints("auto", 4), MACHINE)
    error = infeasible(search, step, MACHINE, 2**20)
    assert "MiB of optimizer states" in str(error) and "does not move" not in str(error)
    assert "world size 8" in error.hint


def test_remedies_are_offload_nvme_and_tiles_too() -> None:
    step = step_of([Layer(rows=2**24, stream=2**10, inside=2**10, flops=10**9)] * 4)  # 64 MiB each when whole
    search = Search(step, Constraints(3, 8, bucket_size=2**23, prefetch=0), MACHINE)
    error = infeasible(search, step, MACHINE, 150 * 2**20)
    assert "of device memory per rank at least and may use 150 MiB" in str(error)
    remedies = error.hint.removeprefix("what would help: ").split("; ")
    fitting = [remedy for remedy in remedies if remedy.endswith("then it fits")]
    assert any(remedy.startswith("tile= for large linear layers: ") for remedy in fitting)
    alone = [remedy for remedy in remedies if remedy.startswith('offload="parameters", tier="nvme": ')]
    assert len(alone) == 1 and " less, " in alone[0]
    runs = Search(step, replace(search.constraints, executable=()), MACHINE)
    hint = infeasible(runs, step, MACHINE, 150 * 2**20).hint
    assert "tile= for large linear layers: " in hint and 'offload="parameters", tier="nvme": ' in hint


def test_tiles_of_the_loss_and_of_tokens_are_remedies() -> None:
    step = gpt(ModelSize.of(layers=2, hidden=256, vocab=50_000), Training(batch=8), 2, 2, sharded=True)
    search = Search(step, Constraints("auto", 2, loss=1, tokens=1, executable=()), MACHINE)
    hint = infeasible(search, step, MACHINE, search.smallest.peak // 3).hint
    assert re.search(r'loss_tiles="auto": [^;]*, then it fits', hint) and "token_tiles" not in hint
    step = step_of([Layer(stream=10**7, inside=10**9, flops=10**12)])
    inside = tuple(v.name for v in step.values if v.bytes == 10**9)
    step = replace(step, token_regions=(TokenRegion("blocks.0", "blocks.0:up", ("blocks.0.weight",), inside, ()),))
    search = Search(step, Constraints(3, 2, loss=1, tokens=1, executable=()), MACHINE)
    hint = infeasible(search, step, MACHINE, search.smallest.peak // 2).hint
    assert re.search(r'token_tiles="auto": [^;]*, then it fits', hint) and "loss_tiles" not in hint


@pytest.mark.parametrize(("tier", "kind"), [("host", "master copy and states"), ("nvme", "master copy and states")])
def test_every_tier_may_be_the_short_one(tier: Tier, kind: str) -> None:
    step = step_of([Layer(rows=2**24)] * 4)
    constraints = Constraints("auto", 8, bucket_size=2**26, offload="parameters", tier=tier)
    search = Search(step, constraints, MACHINE)
    budget: dict[Tier, int] = {"device": 80 * 10**9, "host": 10**9, "nvme": 10**9} | {tier: 10 * 2**20}
    error = infeasible(search, step, MACHINE, budget)
    first, second = str(error).split("\n\n")[0].splitlines()
    assert f"of {tier} memory per rank at least and may use 10 MiB" in first
    assert "of optimizer states" in second and f"the largest is {kind} of blocks." in second
    other = "nvme" if tier == "host" else "host"
    assert f'offload="optimizer", tier="{other}": ' in error.hint
    assert f"more {tier} memory" in error.hint


def test_what_is_needed_of_a_tier_is_what_the_formulas_say() -> None:
    step = step_of([Layer(rows=2**24)] * 4)
    search = Search(step, Constraints("auto", 8, bucket_size=2**26, offload="parameters", tier="nvme"), MACHINE)
    error = infeasible(search, step, MACHINE, {"device": 80 * 10**9, "host": 10**9, "nvme": 0})
    assert "needs 128 MiB of nvme memory" in str(error)  # 64 M parameters of 4 + 4 + 8 bytes over 8 ranks


@pytest.mark.slow
def test_the_plan_that_is_reported_is_less_over_than_any_that_offloads_all() -> None:
    """Device and host are both short: plans that spread over both beat those that fill one of them."""
    step = step_of([Layer(rows=2**24)] * 3)
    search = Search(step, Constraints("auto", 8, offload="auto"), MACHINE)
    budget: dict[Tier, int] = {"device": 100 * 2**20, "host": 2**20, "nvme": 2**20}
    closest, most = search.closest(budget), (100 * 2**20, 2**20, 2**20)
    assert search.within(budget) is None
    least = min(max(p / m for p, m in zip(c.peaks, most, strict=True)) for c in search.best)
    assert max(p / m for p, m in zip(closest.peaks, most, strict=True)) == least
    text = str(infeasible(search, step, MACHINE, budget))
    for tier, peak, have in zip(TIERS, closest.peaks, most, strict=True):
        assert (f"of {tier} memory per rank" in text) == (peak > have)


_LAYER = st.builds(
    Layer,
    rows=st.sampled_from([8, 4096, 2**20, 2**22]),
    stream=st.sampled_from([1024, 10**6, 10**8]),
    inside=st.sampled_from([4096, 10**7, 10**8]),
    flops=st.sampled_from([10**6, 10**10, 10**12]),
)


@st.composite
def searches(draw: st.DrawFn) -> tuple[Search, Step, dict[Tier, int], list[Layer]]:
    """A step, what was fixed, and a budget of which the plan that comes closest needs up to twice as much."""
    layers = draw(st.lists(_LAYER, min_size=1, max_size=4))
    stage = draw(st.sampled_from([0, 1, 2, 3, "auto"]))
    kinds = st.sampled_from([(True, True), (True, True), (False, True)])
    step = of_kinds(step_of(layers), [(draw(kinds)[0] and stage != 0, True) for _ in layers])
    offload = draw(st.sampled_from(["none", "optimizer", "auto"])) if stage != 0 else "none"
    constraints = Constraints(
        stage,
        draw(st.sampled_from([2, 4, 8, 16])),
        bucket_size=draw(st.sampled_from([None, 2**24])),
        prefetch=draw(st.sampled_from([None, 2])),
        recompute=draw(st.sampled_from(["auto", "none"])),
        offload=offload,
        tier="host" if offload == "optimizer" else None,
    )
    search = Search(step, constraints, MACHINE, work=5_000)
    least = [min(c.peaks[i] for c in search.best) for i in range(3)]
    shares = [draw(st.floats(0.3, 0.95)), draw(st.floats(0.3, 2)), draw(st.floats(0.3, 2))]
    sizes = [int(size * share) for size, share in zip(least, shares, strict=True)]
    room = draw(st.sampled_from([0, 2**22, 2**40]))
    return search, step, {"device": sizes[0], "host": sizes[1] + room, "nvme": sizes[2] + room}, layers


@settings(max_examples=examples(25), deadline=None)
@given(searches())
def test_what_is_said_to_fit_then_does_fit_when_it_is_done(
    found: tuple[Search, Step, dict[Tier, int], list[Layer]],
) -> None:
    search, step, budget, layers = found
    for change in changes(search, step, MACHINE, budget):
        if any(c.fits(limits(change.budget)) for c in change.smallest(MACHINE, search.moments)):
            done, states = change.step, change.states
            if change.text.startswith("half the batch"):
                half = [replace(x, stream=x.stream // 2, inside=x.inside // 2, flops=x.flops // 2) for x in layers]
                done = of_kinds(step_of(half), [(p.sharded, p.trainable) for p in step.params])
            again = Search(done, change.constraints, MACHINE, states=states, work=5_000)
            assert again.within(change.budget) is not None, change.text


def test_twice_the_ranks_share_one_host() -> None:
    step = step_of([Layer(rows=2**24)] * 4)
    search = Search(step, Constraints("auto", 4, offload="optimizer", tier="host"), MACHINE)
    budget: dict[Tier, int] = {"device": 10**12, "host": 150 * 2**20, "nvme": 0}  # of 258 MiB on each of 4
    error = infeasible(search, step, MACHINE, budget)
    assert "world size 8: 129 MiB less, not enough alone" in error.hint


def test_one_rank_offloads_its_parameters_where_the_step_has_them() -> None:
    whole = of_kinds(step_of([Layer(rows=2**20, stream=1024, inside=4096)] * 8), [(False, True)] * 8).over(1)
    search = Search(whole, Constraints(3, 1), MACHINE)
    budget: dict[Tier, int] = {"device": search.smallest.peak // 2, "host": 2**40, "nvme": 2**40}
    hint = infeasible(search, whole, MACHINE, budget).hint
    assert re.search(r'offload="parameters", tier="host"[^:]*: [^;]*, then it fits', hint) and "trace" not in hint
    ops = (replace(op, params=()) for op in whole.ops if not op.name.startswith("grad"))
    own = replace(whole, params=(), ops=tuple(ops))  # as without a compute dtype
    hint = infeasible(Search(own, Constraints(3, 1), MACHINE, states=2**30), own, MACHINE, 2**29).hint
    assert 'offload="optimizer"' not in hint and 'offload="auto", which takes a trace of its own' in hint


def test_stage_0_shards_where_it_is_asked_to() -> None:
    step = of_kinds(step_of([Layer(rows=2**20, stream=1024, inside=4096)] * 4), [(False, True)] * 4)
    error = infeasible(Search(step, Constraints(0, 8), MACHINE), step, MACHINE, 40 * 2**20)
    assert 'stage="auto": ' in error.hint and "then it fits" in error.hint


def test_the_error_of_a_deep_step_comes_in_a_moment() -> None:
    """In tasks that every change simulates; each takes up to 10 us of a processor that others share."""
    step = transformer(layers=64, hidden=8192, tokens=4096)
    search, budget = (
        Search(step, Constraints(3, 8, bucket_size=2**25, prefetch=1), MACHINE),
        {"device": 2**30, "host": 2**30, "nvme": 2**30},
    )
    work = 0
    for change in changes(search, step, MACHINE, budget):  # type: ignore[arg-type]
        spaces = {id(c.space): c.space for c in change.smallest(MACHINE, 2)}
        work += sum(space.work for space in spaces.values())
    assert work < 250_000
