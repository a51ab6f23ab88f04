"""Steps that offload and tile: bytes as the formulas count them, invariants of every schedule, and what is refused.

Tests ``planner/programs/placement.py`` and ``planner/explain/plan_file.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.formulas import STAGING, checkpoint_bytes, layer_bytes, layout_of, model_states, needs, total
from planner.steps import Layer, of_kinds, profile_of, step_of
from quick import examples

from zerograph.core.errors import ZeroGraphError
from zerograph.core.executable import tiers_run
from zerograph.core.files.planfile import PlanFile
from zerograph.core.instructions import Move
from zerograph.core.layout import Layout
from zerograph.core.machine import TIERS, Machine, Tier, machine_named
from zerograph.core.param_bytes import gathered_bytes, state_bytes
from zerograph.core.plan import OVERLAPS, Bucket, Offload, Placement, Plan, tile_rows
from zerograph.core.slots import SLOTS
from zerograph.core.step import Step
from zerograph.core.timeline import Forecast
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.strategy import Activations, Strategy, placements
from zerograph.planner.estimate.training import Training
from zerograph.planner.explain.check_file import check_file
from zerograph.planner.explain.plan_file import file_from_search
from zerograph.planner.profile.liveness import offloaded
from zerograph.planner.programs.coarse import coarse_programs, snapshot
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.programs.placement import Shards, bucket_parts
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.constraints import PLACEMENTS, Constraints
from zerograph.planner.search.search import Search
from zerograph.sim.costs import TierBytes
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import time_and_peaks

GPU, CPU = machine_named("h100-80gb"), machine_named("cpu")
MIB = 2**20


def scheduler_of(step: Step, plan: Plan, machine: Machine, moments: int = 2) -> Scheduler:
    rates = Rates(machine, plan.world_size, plan.compute_dtype)
    params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
    return Scheduler(profile_of(step, plan), params, names, rates, moments)


def ruled(step: Step, stage: int = 3, world: int = 4, bucket_size: int = MIB, prefetch: int = 1) -> Plan:
    return plan_step(step, stage=stage, world_size=world, bucket_size=bucket_size, prefetch=prefetch)


def placed(plan: Plan, placements: Placement, tiles: int = 1) -> Plan:
    return replace(plan, buckets=tuple(replace(b, placement=placements, tiles=tiles) for b in plan.buckets))


def file_of(step: Step, plan: Plan, machine: Machine, moments: int = 2) -> PlanFile:
    scheduler = scheduler_of(step, plan, machine, moments)
    forecast, holdings = forecast_plan(scheduler, plan)
    budget = {tier: peak.bytes for tier, peak in forecast.peaks.items()}
    return PlanFile(
        "any", plan, machine, budget, forecast, holdings, programs=snapshot(coarse_programs(scheduler, plan))
    )


def test_what_nothing_executes_yet_is_reported() -> None:
    step = step_of([Layer(rows=1024)] * 2)
    plan = ruled(step)
    name = plan.buckets[0].name
    assert file_of(step, plan, GPU).unexecuted == ""
    remote = placed(plan, Placement("device", "host", "nvme"))
    assert file_of(step, remote, GPU).unexecuted == ""
    assert file_of(step, remote, CPU).unexecuted == f"gradients on host, optimizer on nvme (bucket {name})"
    there = replace(plan, offload=(("blocks.0", "host"),))
    assert file_of(step, there, CPU).unexecuted == "activations of blocks.0 on host"
    one = ruled(step, bucket_size=1)
    tiled = replace(placed(one, Placement("host", "host", "host"), tiles=2), offload=(("blocks.0", "host"),))
    assert file_of(step, tiled, GPU).unexecuted == ""
    assert file_of(step, placed(one, Placement(), tiles=2), GPU).unexecuted == ""


# Against the formulas ------------------------------------------------------------------------------------------------


def test_activations_of_a_cpu_can_be_run_where_its_tier_is() -> None:
    step = step_of([Layer(rows=1024)] * 2)
    plan = replace(ruled(step), offload=(("blocks.0", "nvme"),))
    assert file_of(step, plan, CPU).unexecuted == ""


def test_what_waits_off_the_device_is_what_coarse_programs_move() -> None:
    for recompute, save in (((), ()), (("blocks.1",), ()), (("blocks.0", "blocks.1", "blocks.2"), ())):
        step = step_of([Layer(rows=1024)] * 3)
        plan = replace(
            ruled(step), recompute=recompute, save=save, offload=(("blocks.0", "nvme"), ("blocks.1", "nvme"))
        )
        forward = coarse_programs(scheduler_of(step, plan, CPU), plan)[0]
        moved = sum(
            i.bytes
            for i in forward.instructions
            if isinstance(i, Move) and i.what == "activations" and i.target == "nvme"
        )
        assert offloaded(step, plan) == {"nvme": moved} and moved > 0


def test_a_search_may_be_given_where_activations_wait() -> None:
    """Anywhere, where the plan can be run and something may leave; else where they were told to."""
    step, machine = step_of([Layer(rows=256, inside=2 * MIB)] * 4), replace(CPU, device_memory=10**12)
    executable = tiers_run(machine)
    kept = Search(step, Constraints(3, 2, offload="auto", saved="device", executable=executable), machine)
    assert not any(candidate.plan.offload for candidate in kept.best)
    free = Search(step, Constraints(3, 2, offload="auto", executable=executable), machine)
    assert any(candidate.plan.offload for candidate in free.best)
    assert free.smallest.peak < kept.smallest.peak
    search = Search(step, Constraints(3, 2, saved="nvme", executable=executable), machine)
    assert all(len(candidate.plan.offload) == 4 for candidate in search.best)


def half(step: Step) -> Step:
    """The same, computing in 16 bit."""
    return replace(step, params=tuple(replace(p, compute_dtype="bfloat16") for p in step.params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize(("stage", "offload", "tier"), [p for p in placements(("host", "nvme")) if p[0] >= 2])
def test_model_states_are_those_of_the_formulas_to_the_byte(
    dtype: str, world: int, stage: int, offload: str, tier: Tier
) -> None:
    """At the end of a step there are parameters, gradients and optimizer states, and the loss (4 bytes)."""
    step = step_of([Layer(rows=MIB, inside=10**6)] * 4)
    step = half(step) if dtype == "bfloat16" else step
    strategy = Strategy(stage, offload, tier)  # type: ignore[arg-type]
    plan = ruled(step, stage, world)
    plan = placed(plan, strategy.placement)
    memory = file_of(step, plan, GPU).forecast.memory
    formula = model_states(ModelSize(4 * MIB, 4, 512, 512, 4), layout_of(Training(dtype=dtype)), strategy, world)
    for at in TIERS:
        level = memory[at][-1][1] if at in memory else 0
        assert level - 4 * (at == "device") == total(formula, at), at


def test_stage_1_holds_the_optimizer_as_the_formulas_do() -> None:
    """Formulas let stage 1 keep whole gradients, as the paper has it; ours are reduced as at stage 2."""
    step, strategy = step_of([Layer(rows=MIB)] * 4), Strategy(1, "optimizer", "nvme")
    memory = file_of(step, placed(ruled(step, stage=1), Placement(optimizer="nvme")), GPU).forecast.memory
    formula = model_states(ModelSize(4 * MIB, 4, 512, 512, 4), layout_of(Training(dtype="float32")), strategy, 4)
    assert memory["nvme"][-1][1] == total(formula, "nvme")
    assert memory["host"][-1][1] == 0


def test_staging_holds_what_three_buckets_need() -> None:
    """As the formula's three buffers do, above the least size of one."""
    step = step_of([Layer(rows=64 * MIB, inside=10**6)] * 8)
    plan = placed(ruled(step, bucket_size=64 * MIB), PLACEMENTS[-1])
    update = 4 * 64 * MIB // 4 * (3 + 1 + 1)  # states, gradient and new copy of one rank's shard
    peak = file_of(step, plan, GPU).forecast.peaks["host"].bytes
    assert update > STAGING
    assert 2 * update < peak <= 3 * update


@pytest.mark.parametrize("activations", ["keep", "recompute", "host", "nvme"])
@pytest.mark.parametrize(("stage", "offload", "tier"), [p for p in placements(("host", "nvme")) if p[0] >= 2])
def test_peaks_of_a_gpt_like_step_are_near_the_formulas(
    stage: int, offload: str, tier: Tier, activations: Activations
) -> None:
    """24 layers of hidden size 2048, one bucket each. Formulas leave out the gradient that is being reduced while the
    next is made, and one layer's temporaries: up to a third of the little that stays when all else leaves. They count
    the last layer's checkpoint, which is needed at once and stays."""
    layers, hidden, world = 24, 2048, 8
    elements = 12 * hidden**2
    training = Training(batch=1, seq=1024, dtype="float32", bucket_size=4 * elements)
    size = ModelSize(layers * elements, layers, hidden, 1, hidden // 128)
    stream = checkpoint_bytes(size, training)
    # Each layer saves what is before and after its activation function, and its input.
    inside = (layer_bytes(size, training) - stream) // 2
    step = step_of([Layer(rows=elements, stream=stream, inside=inside, flops=10**12)] * layers)
    strategy = Strategy(stage, offload, tier, activations)  # type: ignore[arg-type]
    names = tuple(f"blocks.{i}" for i in range(layers))
    plan = replace(
        placed(ruled(step, stage, world, bucket_size=4 * elements), strategy.placement),
        recompute=names if strategy.recomputes else (),
        offload=tuple((name, activations) for name in names) if activations in TIERS else (),
    )
    forecast, formula = file_of(step, plan, GPU).forecast, needs(size, training, strategy, world)
    tolerance = {"device": 0.35, "host": 0.1, "nvme": 0.1}
    for at in TIERS:
        staged = at == "host" and any(need.item == "staging buffers" for need in formula)
        if not staged:  # formulas count at least 64 MiB a buffer, and operators where there are buckets here
            assert _peak(forecast, at) == pytest.approx(total(formula, at), rel=tolerance[at]), at


# Invariants ----------------------------------------------------------------------------------------------------------

_LAYER = st.builds(
    Layer,
    rows=st.sampled_from([64, 4096, MIB, 16 * MIB]),
    stream=st.sampled_from([1024, 10**6, 10**8]),
    inside=st.sampled_from([4096, 10**7]),
    flops=st.sampled_from([10**6, 10**10, 10**12]),
)


class Drawn(NamedTuple):
    step: Step
    plan: Plan
    machine: Machine
    moments: int


@st.composite
def plans(draw: st.DrawFn) -> Drawn:
    """Any plan of a small step: placements, tiles, residency and activations decided one by one."""
    step = step_of(draw(st.lists(_LAYER, min_size=1, max_size=5)))
    kinds = st.sampled_from([(True, True)] * 4 + [(True, False), (False, True), (False, False)])
    step = of_kinds(step, [draw(kinds) for _ in step.params])
    machine = draw(st.sampled_from([GPU, CPU]))
    tiers: list[Tier] = ["nvme"] if machine is CPU else ["host", "nvme"]
    stage = draw(st.sampled_from([1, 2, 3]))
    placements = [h for h in PLACEMENTS if h.least_stage <= stage and (machine is GPU or "host" not in str(h))]
    plan = ruled(step, stage, draw(st.sampled_from([1, 2, 4, 16])), prefetch=draw(st.integers(0, 3)))
    buckets = []
    for bucket in plan.buckets:
        tiles, residency = 1, bucket.residency
        if stage == 3:
            rows = bucket.params[0].chunk
            tiles = draw(st.integers(1, min(rows, 5))) if len(bucket.params) == 1 and bucket.params[0].sharded else 1
            residency = draw(st.sampled_from(["use", "backward"])) if tiles == 1 else "use"
        kept = [h for h in placements if h == Placement() or _moves(bucket, h)]
        ahead = draw(st.none() | st.integers(0, plan.prefetch))
        buckets.append(
            replace(bucket, placement=draw(st.sampled_from(kept)), tiles=tiles, residency=residency, ahead=ahead)
        )
    layers = [f"blocks.{i}" for i in range(len(step.params))]
    single = [f"{layer}:{name}" for layer in layers for name in ("up", "act", "out")]
    remote = [name for name in (*layers, *single) if draw(st.booleans())]
    offload = tuple((name, draw(st.sampled_from(tiers))) for name in remote)
    recompute = tuple(layer for layer in layers if draw(st.booleans()))
    inside = [f"{layer}:{name}" for layer in recompute for name in ("up", "act")]
    save = tuple(name for name in inside if draw(st.booleans()))
    plan = replace(plan, buckets=tuple(buckets), offload=offload, recompute=recompute, save=save)
    passes = not any(bucket.placement.optimizer == "nvme" for bucket in buckets)
    plan = replace(plan, update=draw(st.sampled_from(["host", "device"])) if passes else "host")
    if plan.update == "host":
        late = not any(bucket.placement.spilled == "nvme" for bucket in buckets)
        plan = replace(plan, overlap=draw(st.sampled_from([o for o in OVERLAPS if late or o != "delayed"])))
    plan = replace(plan, fetch_ahead=draw(st.integers(1, 4)), reductions=draw(st.integers(1, 3)))
    return Drawn(step, plan, machine, draw(st.integers(0, 2)))


def _moves(bucket: Bucket, placements: Placement) -> bool:
    """Whether anything of ``bucket`` lives elsewhere with ``placements``."""
    return any(p.sharded and (p.trainable or placements.parameters != "device") for p in bucket.params)


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_every_schedule_keeps_what_must_be_true_of_plans(found: Drawn) -> None:
    """Budgets are exactly the peaks; reads, reductions, updates and gathers are looked at by the checks of the CLI."""
    step, plan, machine, moments = found
    file = file_of(step, plan, machine, moments)
    assert check_file(file) == []
    assert Plan.from_json(plan.to_json()) == plan
    assert PlanFile.from_json(file.to_json()) == file


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_books_explain_every_byte_at_every_moment(found: Drawn) -> None:
    step, plan, machine, moments = found
    file = file_of(step, plan, machine, moments)
    spans = file.forecast.spans
    for tier, curve in file.forecast.memory.items():
        mine = [h for h in file.holdings if h.tier == tier]
        assert all(h.bytes > 0 for h in mine)
        for time, level in curve:
            if not any(span.start == span.end == time for span in spans):
                assert sum(h.bytes for h in mine if h.held_at(time, spans)) == level


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_whatever_is_taken_is_given_back_or_lives_on(found: Drawn) -> None:
    """Of what a step takes, only gradients, buckets that stay whole for the next one, free buffers, and the loss are
    left."""
    step, plan, machine, moments = found
    file = file_of(step, plan, machine, moments)
    alive = [h for h in file.holdings if h.first >= 0 and h.last == -1]
    left = Counter(h.kind for h in alive if not h.name.startswith("free buffer"))
    # There is nothing to gather of what every rank holds as kernels read it. Where the master is elsewhere, the copy in
    # the compute dtype is a part of the whole: all of it on one rank.
    world, gathered = plan.world_size, 0
    for b in plan.buckets:
        rates = Rates(machine, world, plan.compute_dtype)
        (part,) = bucket_parts(b.index, b.name, b.params, 1, {}, rates, moments)
        in_place = b.placement.parameters == "device" and (world == 1 or b.placement.optimizer != "device")
        placed = part.shards.at(b.placement)
        own = (placed.in_place if world == 1 else placed.copies * rates.overlaps) if in_place else 0
        gathered += b.residency == "step" and gathered_bytes(b.params) > own
    assert (left["gathered"], left["activation"]) == (gathered, 1)
    assert set(left) <= {"gathered", "activation", "gradient"}
    gradients = [h.name for h in file.holdings if h.kind == "gradient" and h.last == -1]
    assert all(name.startswith("gradient of ") for name in gradients)


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_peaks_of_the_search_are_those_of_the_forecast(found: Drawn) -> None:
    step, plan, machine, moments = found
    scheduler = scheduler_of(step, plan, machine, moments)
    forecast, _ = forecast_plan(scheduler, plan)
    held: TierBytes = tuple(("device", size) for size in state_bytes(step.over(plan.world_size).params, moments))
    held += scheduler.moved(plan)
    seconds, peaks, tasks = time_and_peaks(coarse_programs(scheduler, plan), scheduler.shared.costs, held)
    assert tasks == len(forecast.spans)
    assert (seconds, peaks) == (forecast.seconds, tuple(_peak(forecast, tier) for tier in TIERS))


def _peak(forecast: Forecast, tier: Tier) -> int:
    return forecast.peaks[tier].bytes if tier in forecast.peaks else 0


@given(rows=st.integers(1, 100), world=st.integers(1, 8), tiles=st.integers(1, 20))
def test_tiles_cover_every_shard_exactly_once(rows: int, world: int, tiles: int) -> None:
    step = step_of([Layer(rows=rows)])
    plan = placed(ruled(step, world=world), Placement(), tiles)
    chunk = step.over(world).params[0].chunk
    if tiles > chunk:
        assert any("tiles" in wrong for wrong in plan.mistakes())
        return
    assert not list(plan.mistakes())
    (bucket,) = plan.buckets
    slices = tile_rows(chunk, tiles)
    assert [row for begin, end in slices for row in range(begin, end)] == list(range(chunk))
    assert all(end > begin for begin, end in slices)
    parts, (full,) = (
        scheduler_of(step, plan, GPU).bucket_parts(0, tiles),
        scheduler_of(step, plan, GPU).bucket_parts(0, 1),
    )
    assert sum(p.unsharded for p in parts) == full.unsharded and sum(p.gradients for p in parts) == full.gradients
    assert [p.label for p in parts] == [
        f"{bucket.name} tile {i + 1}/{tiles}" if tiles > 1 else bucket.name for i in range(tiles)
    ]
    assert _sum([p.shards for p in parts]) == full.shards


def _sum(parts: Sequence[Shards]) -> Shards:
    alike = tuple(
        one[0]._replace(values=sum(some.values for some in one), copy=sum(some.copy for some in one))
        for one in zip(*(part.alike for part in parts), strict=True)
    )
    gradient, moments = sum(part.gradient for part in parts), sum(part.moments for part in parts)
    return replace(parts[0], alike=alike, gradient=gradient, moments=moments)


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_no_more_than_three_staging_buffers_are_in_use(found: Drawn) -> None:
    """Of updates, and of what is written to NVMe during the passes."""
    step, plan, machine, moments = found
    file = file_of(step, plan, machine, moments)
    spans, staging = file.forecast.spans, Rates(machine, 1, "float32").staging
    staged = [h for h in file.holdings if h.name.startswith("staged") and h.tier == staging]
    writes = [s for s in spans if s.operation == "write" and s.what != "states" and staging == "host"]
    passing = [(spans[s.task - 1].start, s.end) for s in writes]
    assert all(spans[s.task - 1].operation == "spill" and s.task - 1 in s.after for s in writes)
    for span in spans:
        owners = {h.name.partition(" of ")[2] for h in staged if h.held_at(span.start, spans)}
        assert len(owners) <= SLOTS
        assert sum(begin <= span.start < end for begin, end in passing) <= SLOTS


# What it does --------------------------------------------------------------------------------------------------------


def test_tiling_holds_a_few_tiles_instead_of_the_whole() -> None:
    step = step_of([Layer(rows=16 * MIB, stream=1024, inside=1024)] * 3)
    peaks = [
        file_of(step, placed(ruled(step), Placement(), tiles), GPU).forecast.peaks["device"].bytes for tiles in (1, 8)
    ]
    full = 4 * 16 * MIB
    # Beside shards there are at most two whole of: parameters in use and ahead, gradients made and being reduced.
    assert peaks[0] - peaks[1] > 2 * full


def test_what_is_not_sharded_stays() -> None:
    step = step_of([Layer(rows=2)] * 2)  # fewer rows than ranks
    step = replace(step, params=tuple(replace(p, home=Layout("whole", p.home.ranks)) for p in step.params))
    file = file_of(step, placed(ruled(step, world=8), PLACEMENTS[-1]), GPU)
    assert set(file.forecast.peaks) == {"device"}
    assert [s.name for s in file.forecast.spans if s.stream == "compute"][-1] == "optimizer update"


def test_shards_that_do_not_train_leave_with_the_parameters_only() -> None:
    step = step_of([Layer(rows=MIB)] * 2)
    step = replace(step, params=tuple(replace(p, trainable=False) for p in step.params))
    for placement, tiers in ((Placement(optimizer="host"), {"device"}), (PLACEMENTS[3], {"device", "host"})):
        file = file_of(step, placed(ruled(step), placement), GPU)
        assert set(file.forecast.peaks) == tiers
        assert not [s for s in file.forecast.spans if s.stream == "cpu_update"]


def test_a_cpu_reads_nvme_without_a_hop() -> None:
    step = step_of([Layer(rows=MIB)] * 3)
    file = file_of(step, placed(ruled(step), PLACEMENTS[-1]), CPU)
    streams = {s.stream for s in file.forecast.spans}
    assert {"nvme_read", "nvme_write", "cpu_update"} <= streams and not streams & {"h2d", "d2h"}
    assert set(file.forecast.peaks) == {"device", "nvme"}


def test_no_update_begins_before_the_backward_has_ended() -> None:
    step = step_of([Layer(rows=MIB)] * 4)
    file = file_of(step, placed(ruled(step), PLACEMENTS[6]), GPU)
    backward = max(s.end for s in file.forecast.spans if s.name.startswith(("backward", "reduce")))
    updates = [s for s in file.forecast.spans if s.stream == "cpu_update" or s.name.startswith("read states")]
    assert len(updates) == 8 and all(s.start >= backward for s in updates)


def test_activations_come_back_one_layer_ahead() -> None:
    step = step_of([Layer(rows=1024, stream=MIB, inside=64 * MIB, flops=10**12)] * 6)
    plan = replace(ruled(step), offload=tuple((f"blocks.{i}", "host") for i in range(6)), save_others=True)
    kept, moved = (file_of(step, p, GPU) for p in (replace(plan, offload=()), plan))
    assert moved.forecast.peaks["device"].bytes < kept.forecast.peaks["device"].bytes - 3 * 64 * MIB
    spans = {s.name: s for s in moved.forecast.spans}
    fetch = [s for s in moved.forecast.spans if s.name == "fetch activations of blocks.2"]
    # The layer after it reads what it returned, so that comes back one layer earlier.
    assert [s.start >= spans[f"backward blocks.{i}"].end for s, i in zip(fetch, (5, 4), strict=True)] == [True, True]
    assert [s.end <= spans[f"backward blocks.{i}"].start for s, i in zip(fetch, (3, 2), strict=True)] == [True, True]


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placement": Placement(optimizer="host")}, "stage 0 does not shard"),
        ({"placement": Placement(parameters="host")}, "stage 0 does not shard"),
        ({"placement": Placement(optimizer="tape")}, "lives on optimizer on tape"),
        ({"tiles": 2}, "is tiled, and is to stay whole"),
        ({"tiles": 0}, "0 tiles"),
        ({"tiles": 99999}, "99999 tiles of"),
        ({"residency": "always"}, "has residency 'always'"),
    ],
)
def test_mistakes_are_found(change: dict[str, object], message: str) -> None:
    plan = ruled(step_of([Layer()]), stage=0)
    wrong = replace(plan, buckets=(replace(plan.buckets[0], **change),))  # type: ignore[arg-type]
    assert message in next(wrong.mistakes())


def test_placements_farther_than_what_needs_them_are_refused() -> None:
    plan = placed(ruled(step_of([Layer()])), Placement("nvme", "host", "host"))
    assert "none may live farther away" in next(plan.mistakes())
    twice = replace(ruled(step_of([Layer()])), offload=(("blocks.0", "host"), ("blocks.0", "nvme")))
    assert "offloaded twice" in next(twice.mistakes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "world size 0"),
        ({"stage": 7}, "stage 7"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"recompute": ("blocks.0", "blocks.0")}, "blocks.0 is recomputed twice"),
    ],
)
def test_plans_that_nobody_can_have_made_are_refused(change: dict[str, object], message: str) -> None:
    plan = replace(placed(ruled(step_of([Layer()])), Placement(), tiles=2), **change)  # type: ignore[arg-type]
    with pytest.raises(ZeroGraphError, match=message):
        Plan.from_json(plan.to_json())


def test_buckets_of_one_layer_that_share_a_name_may_be_unsharded_together() -> None:
    step = step_of([Layer(rows=1024)] * 3)
    plan = ruled(step, bucket_size=1)
    one = replace(plan, buckets=tuple(replace(bucket, name="blocks") for bucket in plan.buckets))
    file = file_of(step, one, GPU)
    assert len(plan.buckets) == 3 and check_file(file) == []


# What the planner hands out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_moments_that_were_asked_for_are_those_of_the_schedule(moments: int) -> None:
    step = step_of([Layer(rows=MIB)] * 4)
    constraints = Constraints("auto", 8, offload="optimizer", tier="host")
    file = file_from_search("any", step, constraints, GPU, moments=moments)
    assert file.forecast.memory["host"][0][1] == 4 * (4 * MIB // 8) * (1 + moments)
    search = Search(step, constraints, GPU, moments=moments)
    assert min(c.seconds for c in search.best) == file.forecast.seconds
    assert file.forecast.peaks["device"].bytes in {c.peak for c in search.best}


def test_reasons_tell_what_was_asked_for_from_what_was_chosen() -> None:
    step = step_of([Layer(rows=MIB)] * 4)
    asked = Constraints(3, 8, bucket_size=MIB, prefetch=1, recompute="full", offload="optimizer", tier="host")
    chosen = replace(asked, stage="auto", bucket_size=None, prefetch=None, recompute="auto")
    why = [
        {r.subject: r.why for r in file_from_search("any", step, constraints, GPU).reasons}
        for constraints in (asked, chosen)
    ]
    plans = [
        [r.why for r in file_from_search("any", step, constraints, GPU).reasons[:3]] for constraints in (asked, chosen)
    ]
    assert set(plans[0]) == {"it was asked for"} and "it was asked for" not in plans[1]
    assert why[0]["activations"].startswith("it was asked for; products that run again take ")


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize(("offload", "least"), [("parameters", 3), ("optimizer", 1)])
def test_what_has_nothing_to_move_stays_on_the_device(offload: Offload, least: int, tier: Tier) -> None:
    """A scalar, which is not sharded, and a frozen parameter when only the optimizer leaves."""
    step = step_of([Layer(rows=MIB), Layer(rows=1), Layer(rows=MIB)])
    kinds = ((True, True), (False, True), (True, False))
    constraints = Constraints(3, 4, bucket_size=1, offload=offload, tier=tier, tile=False)
    file = file_from_search("any", of_kinds(step, kinds), constraints, GPU)
    assert [b.placement.least_stage for b in file.plan.buckets] == [least, 0, 3 if offload == "parameters" else 0]
    assert check_file(file) == []
