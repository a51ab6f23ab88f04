"""What fits, how fast, and what is the largest that fits, against what ZeRO's papers report; then properties.

Tests ``planner/estimate/preset.py``, ``planner/programs/depths.py``, ``planner/estimate/synthetic.py``,
``planner/estimate/largest_estimate.py`` and ``planner/estimate/shortage.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.formulas import checkpoint_bytes, layer_bytes, layout_of, model_states
from quick import examples

from zerograph.core.errors import ConfigError
from zerograph.core.instructions import Move, Reduce
from zerograph.core.machine import PRESETS, TIERS, Link, Machine, Tier, machine_named
from zerograph.core.plan import Offload, Placement
from zerograph.planner.estimate.estimate import Question, Row, estimate_rows, fastest
from zerograph.planner.estimate.largest_estimate import WHATS, largest_estimate
from zerograph.planner.estimate.preset import DEPTHS, Outcome, Preset
from zerograph.planner.estimate.shortage import shortage
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.strategy import ACTIVATIONS, Activations, Stage, Strategy, placements
from zerograph.planner.estimate.synthetic import gpt
from zerograph.planner.estimate.training import OPTIMIZERS, Attention, Optimizer, Training
from zerograph.planner.profile.regions import profile
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.decisions import with_tiles
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import walk

V100 = machine_named("v100-32gb-dgx2")
PAPER = Training(batch=4, seq=1024, dtype="float16", optimizer="mixed", attention="whole")
ANY = ModelSize.of(layers=1, hidden=128)


def asked(size: ModelSize = ANY, world: int = 1, training: Training = PAPER, **fixed: object) -> Question:
    return Question(size, training, V100, world, **fixed)  # type: ignore[arg-type]


def any_fits(question: Question) -> bool:
    return any(Row(question, strategy).tiled().fits for group in question.groups() for strategy in group)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_data_parallelism_on_a_v100_stops_near_1_4_billion(batch: int) -> None:
    found = largest_estimate(asked(training=replace(PAPER, batch=batch), world=16, stage=0), "params")
    assert 1.4e9 < found.value < 2e9
    kept = largest_estimate(
        asked(training=replace(PAPER, batch=batch), world=16, stage=0, activations="keep"), "params"
    )
    assert 0.7e9 < kept.value <= found.value  # gradients come as activations go: formulas add both up
    assert asked().have["device"] < 16 * 2.1e9  # with no activation at all it would end at 2 billion


def test_zero_offload_trains_13_billion_on_one_v100() -> None:
    published = ModelSize.of(layers=65, hidden=4096, heads=32)
    assert 13e9 < published.parameters < 13.5e9
    for batch in (1, 4, 8):
        offload = asked(published, training=replace(PAPER, batch=batch), stage=2, offload="gradients")
        assert any_fits(offload)
        assert 13e9 < largest_estimate(offload, "params").value < 16.5e9
    assert not any_fits(asked(published, stage=2, tier="device"))
    assert not any_fits(asked(ModelSize.of(layers=25, hidden=8192), stage=2))  # 20 B: 40 GB of 16-bit parameters


@pytest.mark.slow
def test_zero_infinity_fits_a_trillion_on_one_dgx2() -> None:
    published = ModelSize.of(layers=128, hidden=25 * 1024, heads=256)
    found = estimate_rows(asked(published, world=16))
    assert {(row.strategy.stage, row.strategy.tier) for row in found if row.fits} == {(3, "nvme")}
    assert 1e12 < largest_estimate(asked(world=16, stage=3, tier="nvme"), "params").value < 1.8e12


@pytest.mark.slow
def test_zero_infinity_fits_over_30_trillion_on_512_v100() -> None:
    published = ModelSize.of(layers=240, hidden=105 * 1024, heads=1024)
    assert published.parameters > 32e12
    best = fastest(estimate_rows(asked(published, world=512, training=replace(PAPER, batch=1))))
    assert best is not None
    assert best.strategy.placement.optimizer == "nvme"
    assert best.strategy.tiles > 1  # one matrix of 4*h*h is 92 GB in 16 bit
    assert not any_fits(asked(published, world=512, training=replace(PAPER, batch=1), tiles=1))
    how = best.strategy
    same = asked(
        world=512, training=replace(PAPER, batch=1), stage=how.stage, offload=how.offload, tier=how.tier,
        tiles=how.tiles, activations=how.activations,
    )  # fmt: skip
    assert 30e12 < largest_estimate(same, "params").value < 60e12


@pytest.mark.slow
def test_tiers_order_the_largest_model_as_the_papers_do() -> None:
    """The third tier's is a trillion, as the test of one DGX-2 has it."""
    on_device, on_host = (largest_estimate(asked(world=16, tier=tier), "params").value for tier in TIERS[:2])
    assert 20e9 < on_device < 40e9  # 512 GB over 16 bytes is 32 B
    assert 70e9 < on_host < 150e9  # 1.5 TB over 12 bytes is 125 B


def test_compute_is_six_operations_per_parameter_and_token_and_eight_recomputed() -> None:
    """Less the last product of each layer, which nothing in its backward reads: 4 of 12 parameters a layer."""
    size, fast = ModelSize.of(layers=32, hidden=4096), replace(V100, device_bandwidth=1e30, launch=0.0)
    rate = V100.matmul["float16"]
    forward = products_flops(size) / rate
    again = 2 * PAPER.tokens * (8 * 32 * 4096**2 + 2 * 32 * 4096 * 1024) / rate

    def busy(machine: Machine, **how: object) -> float:
        training = replace(PAPER, accumulate=how.pop("accumulate", 1))  # type: ignore[arg-type]
        return Preset(size, training, machine, 1, Strategy(3, **how)).outcome.passes["compute"]  # type: ignore[arg-type]

    assert busy(fast) == pytest.approx(3 * forward, rel=0.001)
    assert busy(fast, activations="recompute") == pytest.approx(3 * forward + again, rel=0.001)
    assert busy(fast, accumulate=5) == pytest.approx(15 * forward, rel=0.001)
    assert 1.05 < busy(V100) / (3 * forward) < 1.4  # what is not a product


def products_flops(size: ModelSize) -> int:
    """Of one pass, ``2*P`` per token and the scores' ``4*L*h*s`` (Megatron-LM)."""
    return 2 * PAPER.tokens * (size.parameters + 2 * size.layers * size.hidden * PAPER.seq)


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
        executed = 3 + 2 / 3  # the last product of each layer, a third of it, is not computed again
        found = executed * products_flops(size) * training.batch / PAPER.batch * accumulate / best.outcome.seconds
        assert 1 < found / published < 1.8


def outcome(size: ModelSize, strategy: Strategy, world: int = 1, training: Training = PAPER) -> Outcome:
    return Preset(size, training, V100, world, strategy).outcome


def test_adam_on_the_host_takes_the_time_of_zero_offload() -> None:
    found = outcome(ModelSize.of(layers=50, hidden=4096), Strategy(2, "gradients", "host"))
    assert found.update["cpu_update"] == pytest.approx(2.57, rel=0.2)  # 10 B parameters, table 4


def test_stage_3_communicates_half_as_much_again() -> None:
    size = ModelSize.of(layers=32, hidden=4096, vocab=1)
    free = replace(V100, intra=replace(V100.intra, latency=0.0), intra_step=0.0)
    found = [Preset(size, PAPER, free, 16, Strategy(stage)).outcome.passes for stage in (0, 1, 2, 3)]
    moved = [passes.get("gather", 0.0) + passes["reduce"] for passes in found]
    volume = 2 * size.parameters * 15 / 16 / free.intra.rate  # the paper's Psi, in 16 bit
    assert moved == pytest.approx([2 * volume, 2 * volume, 2 * volume, 3 * volume])


def test_updates_of_states_on_nvme_are_bound_by_it() -> None:
    size = ModelSize.of(layers=128, hidden=25 * 1024)
    found = outcome(size, Strategy(3, "parameters", "nvme", "recompute"), 16)
    written = size.parameters * (12 + 2) / V100.nvme_write.rate  # optimizer states and the new 16-bit parameters
    assert found.update["nvme_write"] == pytest.approx(written, rel=0.01)
    assert found.seconds == sum(found.lengths) and found.lengths[1] >= found.update["nvme_write"]


@pytest.mark.parametrize(
    ("parameters", "world", "published"),
    [
        (7.5e9, 4, (52.5, 41.3, 30)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 16, (35.6, 21.6, 7.5)),
        (128e9, 64, (536, 284, 32)),
        (1e12, 64, (4187, 2218, 250)),
        (1e12, 1024, (4011, 2013, 15.6)),
    ],
)
def test_states_of_planned_steps_are_those_of_the_zero_paper(
    parameters: float, world: int, published: tuple[float, ...]
) -> None:
    """Between steps; stages 2 and 3 have their gradients beside that. Stage 1 has whole ones between micro-batches."""
    size, found = ModelSize.of(int(parameters)), []
    for stage in (1, 2, 3):
        training = replace(PAPER, accumulate=2)
        held = Preset(size, training, V100, world, Strategy(stage)).held["device"]  # type: ignore[arg-type]
        found.append((held + (2 * parameters if stage < 3 else 0)) / 1e9)
    assert found == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("stage", "offload", "tier"), placements(("host", "nvme")))
def test_what_lies_between_steps_is_what_the_formulas_say(
    optimizer: Optimizer, stage: Stage, offload: Offload, tier: Tier
) -> None:
    """But for what is gathered whole (stages 0 to 2) and the gradients, which come and go with the backward."""
    size, training = ModelSize.of(layers=24, hidden=4096, vocab=4096), Training(optimizer=optimizer)
    strategy, layout = Strategy(stage, offload, tier), layout_of(training)
    found = Preset(size, training, V100, 8, strategy).held
    states = {need.item: need for need in model_states(size, layout, strategy, 8)}
    for at in TIERS:
        formula = sum(n.bytes for item, n in states.items() if n.tier == at and item != "gradients")
        if at == "device" and stage < 3 and not (stage == 0 and layout.resident):
            formula -= states["parameters"].bytes - (offload != "none") * states["parameters"].bytes // 8
        assert found[at] == pytest.approx(formula, rel=1e-3, abs=1), at


@pytest.mark.parametrize("attention", ["fused", "whole"])
def test_a_layer_saves_what_korthikanti_et_al_count(attention: Attention) -> None:
    training = replace(PAPER, attention=attention)
    sizes = [ModelSize.of(layers=n, hidden=2048, vocab=1) for n in (8, 16)]
    few, many = (Preset(s, training, V100, 1, Strategy(0)).outcome.peaks["device"] for s in sizes)
    kept, recomputed = (
        [Preset(s, training, replace(V100), 1, Strategy(2, "gradients", "host", how)) for s in sizes]  # type: ignore[arg-type]
        for how in ("keep", "recompute")
    )
    grown = [b.outcome.peaks["device"] - a.outcome.peaks["device"] for a, b in (kept, recomputed)]
    copies = 2 * (sizes[1].parameters - sizes[0].parameters)
    assert grown[0] - copies == pytest.approx(8 * layer_bytes(sizes[0], training), rel=0.001)
    assert grown[1] - copies == pytest.approx(8 * checkpoint_bytes(sizes[0], training), rel=0.001)
    assert many > few


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(("stage", "offload", "tier"), placements(("host", "nvme")))
def test_a_deep_model_costs_what_its_depths_say(
    stage: Stage, offload: Offload, tier: Tier, activations: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, machine = ModelSize.of(layers=96, hidden=2048), machine_named("h100-80gb")
    asked = Preset(size, Training(batch=4), machine, 8, Strategy(stage, offload, tier, activations))
    continued = asked.outcome
    assert size.layers > max(DEPTHS)
    monkeypatch.setattr("zerograph.planner.estimate.preset.DEPTHS", (1, size.layers))
    whole = asked.outcome
    assert continued.seconds == pytest.approx(whole.seconds, rel=0.005)
    assert continued.peaks == pytest.approx(whole.peaks, rel=0.005)


def test_accumulation_spreads_the_update_over_more_tokens() -> None:
    size = ModelSize.of(layers=50, hidden=4096)
    speeds = [
        Row(asked(size, training=replace(PAPER, accumulate=n)), Strategy(2, "gradients", "host", "recompute"))
        for n in (1, 4, 64)
    ]
    assert speeds[0].tokens_per_second < speeds[1].tokens_per_second < speeds[2].tokens_per_second
    assert speeds[0].need == speeds[2].need


def test_gradients_of_earlier_micro_batches_are_read_back_from_nvme() -> None:
    """By all but the first micro-batch, from which on there are some; none where they live elsewhere."""
    size = ModelSize.of(layers=8, hidden=4096)
    prompt = replace(V100, nvme_read=replace(V100.nvme_read, latency=0.0))

    def read(accumulate: int, tier: Tier) -> float:
        training = replace(PAPER, accumulate=accumulate)
        return Preset(size, training, prompt, 1, Strategy(2, "gradients", tier)).outcome.passes.get("nvme_read", 0.0)

    gradients = 2 * size.parameters / prompt.nvme_read.rate
    assert [read(n, "nvme") for n in (1, 2, 5)] == pytest.approx([0.0, gradients, 4 * gradients], rel=0.01)
    assert read(5, "host") == 0.0


def test_a_shortage_says_what_is_missing_and_what_would_help() -> None:
    found = shortage(estimate_rows(asked(ModelSize.of(layers=65, hidden=4096), tier="device")))
    assert found is not None
    assert found.tier == "device" and found.need > found.have == asked().have["device"]
    assert found.largest.item == "optimizer states"
    assert "needs 19" in str(found) and "has 30.1 GiB" in str(found)
    ways = {remedy.change: remedy for remedy in found.remedies}
    assert ways["stage 2, gradients on host"].fits
    assert ways["stage 2, gradients on host"].saves >= 14 * 13e9
    smaller = ways["batch 2 instead of 4"]  # at the backward's end, where hardly an activation is left
    assert not smaller.fits and smaller.saves < found.need / 500
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


def test_rows_over_hosts_of_cpus_have_the_network_beside_compute() -> None:
    slow = replace(PRESETS["cpu"], inter=Link(25e6))
    asked = Question(ModelSize.of(layers=4, hidden=512, vocab=1000), Training(dtype="float32", seq=128), slow, 4)
    rows = [row for row in estimate_rows(asked) if row.strategy.tier == "device" and row.strategy.stage == 3]
    for row in rows:
        passes = row.outcome.passes
        assert row.outcome.lengths[0] < 0.99 * sum(passes.values())
        assert row.outcome.lengths[0] >= passes["gather"] + passes["reduce"], "on one network, in turn"


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


@pytest.mark.slow
@given(question=QUESTIONS, more=st.tuples(*[st.integers(0, 1 << 42)] * 3))
@settings(deadline=None, max_examples=examples(10))
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
    best = fastest(before)
    if best is None:
        return
    if question.tiles is None:
        # Rows take the fewest tiles that fit. Where collectives take nearly all of a step, more tiles are faster, as
        # they overlap: that row is then still there for who asks for it.
        after = estimate_rows(replace(question, machine=richer, tiles=best.strategy.tiles))
    richest = fastest(after)
    assert richest is not None and richest.outcome.seconds <= best.outcome.seconds


def _place(row: Row) -> tuple[int, str, str]:
    return row.strategy.stage, row.strategy.offload, row.strategy.tier


@pytest.mark.parametrize(("tier", "world"), [("device", 4), ("host", 1), ("host", 4), ("nvme", 1), ("nvme", 4)])
def test_tiles_of_a_tied_embedding_leave_the_gradient_that_the_whole_leaves(tier: Tier, world: int) -> None:
    """The head's tile is reduced first, and the embedding's is added to it."""
    size, training = ModelSize.of(layers=2, hidden=4096, vocab=50_000), replace(PAPER, bucket_size=100 * 2**20)
    step = gpt(size, training, world, 2, sharded=tier != "device" or world > 1)
    placement = Placement(tier, tier, tier)
    plan = plan_step(step, stage=3, world_size=world, bucket_size=training.bucket_size, prefetch=1, placement=placement)
    embedding = plan.bucket_of()["embed.weight"].index
    params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
    scheduler = Scheduler(profile(step, "none"), params, names, Rates(V100, world, training.dtype))
    left, reductions, back = [], [], []
    for tiles in (1, 4):
        programs = coarse_programs(scheduler, with_tiles(plan, {embedding: tiles}))[:2]
        own = [i for i in programs[1].instructions if isinstance(i, Reduce | Move) and i.bucket == embedding]
        reductions.append(sum(isinstance(i, Reduce) for i in own))
        back.append(sum(isinstance(i, Move) and i.what == "gradient" and i.rises for i in own))
        events = walk(programs, scheduler.shared.costs).events
        left.append({at: sum(size for *_, size in events[at]) for at in TIERS})
    assert reductions == [1, 2 * 4] and back == [0, 4 * (tier == "nvme")]
    assert left[0] == left[1] and left[0][tier] > 0


@given(question=QUESTIONS, what=st.sampled_from(WHATS))
@settings(deadline=None, max_examples=3)
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
@settings(deadline=None, max_examples=4)
def test_a_row_is_the_fastest_of_its_choices_that_fit(question: Question) -> None:
    for row, group in zip(estimate_rows(question), question.groups(), strict=True):
        tried = [Row(question, strategy).tiled() for strategy in group]
        fitting = [one.outcome.seconds for one in tried if one.fits]
        assert row.fits == bool(fitting)
        assert not fitting or row.outcome.seconds == min(fitting)
        for tier in TIERS:
            assert row.need[tier] == sum(need.bytes for need in row.preset.needs if need.tier == tier)
