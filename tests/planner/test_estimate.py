"""What fits, how fast, and what is the largest that fits, against what ZeRO's papers report; then properties.

Tests ``planner/largest_estimate.py``, ``planner/shortage.py`` and ``planner/timing.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerograph.core.errors import ConfigError
from zerograph.core.machine import PRESETS, TIERS, machine_named
from zerograph.planner.estimate import Question, Row, any_fits, estimate_rows, fastest
from zerograph.planner.largest_estimate import WHATS, largest_estimate
from zerograph.planner.shortage import shortage
from zerograph.planner.sizes import ModelSize
from zerograph.planner.strategy import Strategy
from zerograph.planner.timing import collectives, compute, products_flops, timing
from zerograph.planner.training import OPTIMIZERS, Training

V100 = machine_named("v100-32gb-dgx2")
PAPER = Training(batch=4, seq=1024, dtype="float16", optimizer="mixed", attention="whole")
ANY = ModelSize.of(layers=1, hidden=128)


def asked(size: ModelSize = ANY, world: int = 1, training: Training = PAPER, **fixed: object) -> Question:
    return Question(size, training, V100, world, **fixed)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_data_parallelism_on_a_v100_stops_near_1_4_billion(batch: int) -> None:
    found = largest_estimate(asked(training=replace(PAPER, batch=batch), world=16, stage=0), "params")
    assert 1.4e9 < found.value < 2e9
    kept = largest_estimate(
        asked(training=replace(PAPER, batch=batch), world=16, stage=0, activations="keep"), "params"
    )
    assert 0.7e9 < kept.value < 1.8e9
    assert asked().have("device") < 16 * 2.1e9  # with no activation at all it would end at 2 billion


def test_zero_offload_trains_13_billion_on_one_v100() -> None:
    published = ModelSize.of(layers=65, hidden=4096, heads=32)
    assert 13e9 < published.parameters < 13.5e9
    for batch in (1, 4, 8):
        offload = asked(published, training=replace(PAPER, batch=batch), stage=2, offload="gradients")
        assert any_fits(offload)
        assert 13e9 < largest_estimate(offload, "params").value < 16.5e9
    assert not any_fits(asked(published, stage=2, tier="device"))
    assert not any_fits(asked(ModelSize.of(layers=25, hidden=8192), stage=2))  # 20 B: 40 GB of 16-bit parameters


def test_zero_infinity_fits_a_trillion_on_one_dgx2() -> None:
    published = ModelSize.of(layers=128, hidden=25 * 1024, heads=256)
    found = estimate_rows(asked(published, world=16))
    assert {(row.strategy.stage, row.strategy.tier) for row in found if row.fits} == {(3, "nvme")}
    assert 1e12 < largest_estimate(asked(world=16), "params").value < 1.8e12


def test_zero_infinity_fits_over_30_trillion_on_512_v100() -> None:
    published = ModelSize.of(layers=240, hidden=105 * 1024, heads=1024)
    assert published.parameters > 32e12
    best = fastest(estimate_rows(asked(published, world=512, training=replace(PAPER, batch=1))))
    assert best is not None
    assert best.strategy.home("optimizer") == "nvme"
    assert best.strategy.tiles > 1  # one matrix of 4*h*h is 92 GB in 16 bit
    assert not any_fits(asked(published, world=512, training=replace(PAPER, batch=1), tiles=1))
    assert 30e12 < largest_estimate(asked(world=512, training=replace(PAPER, batch=1)), "params").value < 60e12


def test_tiers_order_the_largest_model_as_the_papers_do() -> None:
    on_device, on_host, on_nvme = (largest_estimate(asked(world=16, tier=tier), "params").value for tier in TIERS)
    assert 20e9 < on_device < 40e9  # 512 GB over 16 bytes is 32 B
    assert 70e9 < on_host < 150e9  # 1.5 TB over 12 bytes is 125 B
    assert on_nvme > 1e12


def test_compute_is_six_operations_per_parameter_and_token_and_eight_recomputed() -> None:
    size, fast = ModelSize.of(layers=32, hidden=4096), replace(V100, device_bandwidth=1e30)
    forward = 2 * PAPER.tokens * (size.parameters + 2 * 32 * 4096 * 1024) / V100.matmul["float16"]
    assert compute(size, PAPER, Strategy(3), fast) == pytest.approx(3 * forward)
    assert compute(size, PAPER, Strategy(3, activations="recompute"), fast) == pytest.approx(4 * forward)
    assert compute(size, replace(PAPER, accumulate=5), Strategy(3), fast) == pytest.approx(15 * forward)
    assert 1.05 < compute(size, PAPER, Strategy(3), V100) / (3 * forward) < 1.4  # what is not a product


def test_throughput_is_that_of_the_papers_within_a_factor() -> None:
    """ZeRO-Offload: 40 TFlops with 10 B on one V100. ZeRO-Infinity: 25 PFlops with 1 T on 512."""
    for layers, hidden, heads, world, offload, accumulate, published in (
        (50, 4096, 32, 1, "gradients", 64, 40e12),
        (128, 25 * 1024, 256, 512, "parameters", 1, 25e15 / 512),
    ):
        size = ModelSize.of(layers=layers, hidden=hidden, heads=heads)
        training = replace(PAPER, batch=8, accumulate=accumulate)
        best = fastest(estimate_rows(asked(size, world, training, offload=offload)))
        assert best is not None and best.strategy.recomputes
        found = 4 * products_flops(size, training) * accumulate / best.timing.seconds
        assert 1 < found / published < 1.8  # nothing is lost to imperfect overlap


def test_adam_on_the_host_takes_the_time_of_zero_offload() -> None:
    size = ModelSize.of(layers=50, hidden=4096)
    found = timing(size, PAPER, Strategy(2, "gradients", "host"), 1, V100)
    assert found.update["optimizer"] == pytest.approx(2.57, rel=0.2)  # 10 B parameters, table 4


def test_stage_3_communicates_half_as_much_again() -> None:
    size = ModelSize.of(layers=32, hidden=4096)
    free = replace(V100, intra=replace(V100.intra, latency=0.0))
    found = [collectives(size, PAPER, Strategy(stage), 16, free) for stage in (0, 1, 2, 3)]
    volume = 2 * size.parameters * 15 / 16 / free.intra.rate  # the paper's Psi, in 16 bit
    assert found == pytest.approx([2 * volume, 2 * volume, 2 * volume, 3 * volume])
    assert collectives(size, PAPER, Strategy(3), 1, free) == 0


def test_the_longest_stream_of_each_phase_bounds_the_step() -> None:
    size = ModelSize.of(layers=128, hidden=25 * 1024)
    found = timing(size, PAPER, Strategy(3, "parameters", "nvme", "recompute"), 16, V100)
    assert found.seconds == max(found.passes.values()) + max(found.update.values())
    written = size.parameters * (12 + 2) / V100.nvme_write.rate  # optimizer states and the new 16-bit parameters
    assert found.update["nvme_write"] == pytest.approx(written, rel=0.01)
    assert found.bound == "nvme_write"


def test_accumulation_spreads_the_update_over_more_tokens() -> None:
    size = ModelSize.of(layers=50, hidden=4096)
    speeds = [
        Row(asked(size, training=replace(PAPER, accumulate=n)), Strategy(2, "gradients", "host", "recompute"))
        for n in (1, 4, 64)
    ]
    assert speeds[0].tokens_per_second < speeds[1].tokens_per_second < speeds[2].tokens_per_second
    assert speeds[0].need == speeds[2].need


def test_a_shortage_says_what_is_missing_and_what_would_help() -> None:
    found = shortage(estimate_rows(asked(ModelSize.of(layers=65, hidden=4096), tier="device")))
    assert found is not None
    assert found.tier == "device" and found.need > found.have == asked().have("device")
    assert found.largest.item == "optimizer states"
    assert "needs 19" in str(found) and "has 30.1 GiB" in str(found)
    ways = {remedy.change: remedy for remedy in found.remedies}
    assert ways["stage 2, gradients on host"].fits
    assert ways["stage 2, gradients on host"].saves >= 14 * 13e9
    assert not ways["batch 2 instead of 4"].fits
    assert [remedy.fits for remedy in found.remedies] == sorted(
        (remedy.fits for remedy in found.remedies), reverse=True
    )


def test_the_capacity_a_shortage_asks_for_is_enough() -> None:
    for size in (ModelSize.of(layers=65, hidden=4096), ModelSize.of(layers=200, hidden=30_000)):
        found = shortage(estimate_rows(asked(size, world=3, tier="device")))
        assert found is not None
        assert [remedy.fits for remedy in found.remedies if "more on device" in remedy.change] == [True]


def test_a_cpu_offloads_to_nvme_only() -> None:
    found = estimate_rows(Question(ModelSize.of(layers=4, hidden=512), Training(dtype="float32"), PRESETS["cpu"], 2))
    assert {row.strategy.tier for row in found} == {"device", "nvme"}
    assert all(row.need["host"] == 0 for row in found)


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no row"):
        estimate_rows(asked(stage=1, offload="parameters"))
    with pytest.raises(ConfigError, match="world size"):
        asked(world=0)
    with pytest.raises(ConfigError, match="batch"):
        Training(batch=0)
    with pytest.raises(ConfigError, match="dtype"):
        Training(dtype="int8")


QUESTIONS = st.builds(
    Question,
    size=st.builds(lambda layers, heads: ModelSize.of(layers=layers, hidden=128 * heads), *[st.integers(1, 150)] * 2),
    training=st.builds(
        Training,
        batch=st.integers(1, 32),
        seq=st.integers(1, 1 << 15),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        optimizer=st.sampled_from(OPTIMIZERS),
        attention=st.sampled_from(["fused", "whole"]),
    ),
    machine=st.sampled_from(list(PRESETS.values())),
    world_size=st.integers(1, 1024),
    stage=st.sampled_from([None, 0, 2, 3]),
    tiles=st.sampled_from([None, 1, 8]),
    activations=st.sampled_from([None, "keep", "recompute"]),
)


@given(question=QUESTIONS, more=st.tuples(*[st.integers(0, 1 << 42)] * 3))
@settings(deadline=None)
def test_more_memory_never_makes_a_fitting_row_not_fit(question: Question, more: tuple[int, int, int]) -> None:
    machine = question.machine
    richer = replace(
        machine,
        device_memory=machine.device_memory + more[0],
        host_memory=machine.host_memory + more[1],
        nvme_capacity=machine.nvme_capacity + more[2],
    )
    before, after = estimate_rows(question), estimate_rows(replace(question, machine=richer))
    assert {_place(row) for row in before if row.fits} <= {_place(row) for row in after if row.fits}
    best, richest = fastest(before), fastest(after)
    assert best is None or (richest is not None and richest.timing.seconds <= best.timing.seconds)


def _place(row: Row) -> tuple[int, str, str]:
    return row.strategy.stage, row.strategy.offload, row.strategy.tier


@given(question=QUESTIONS, what=st.sampled_from(WHATS))
@settings(deadline=None, max_examples=30)
def test_the_largest_fits_and_the_next_does_not(question: Question, what: str) -> None:
    found = largest_estimate(question, what)  # type: ignore[arg-type]
    assert not any_fits(found.beyond)
    if found.question is None:
        assert found.value == 0
        return
    assert any_fits(found.question)
    now, then = found.question, found.beyond
    if what == "params":
        assert (then.size.layers, then.size.hidden) == (now.size.layers + 1, now.size.hidden)
        assert found.value == now.size.parameters == now.size.formula
    else:
        assert getattr(now.training, what) == found.value == getattr(then.training, what) - 1


@given(question=QUESTIONS)
@settings(deadline=None)
def test_a_row_is_the_fastest_of_its_choices_that_fit(question: Question) -> None:
    for row, group in zip(estimate_rows(question), question.groups(), strict=True):
        fitting = [Row(question, strategy).timing.seconds for strategy in group if question.fits(strategy)]
        assert row.fits == bool(fitting)
        assert not fitting or row.timing.seconds == min(fitting)
