"""The head and its loss in tiles over tokens: logits are held a tile at a time, and computed again in the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of
from quick import examples

from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.instructions import Reduce
from zerograph.core.layout import Layout
from zerograph.core.machine import TIERS, machine_named
from zerograph.core.plan import OVERLAPS, GivenPlan, Overlap, Placement, Plan
from zerograph.core.step import Op, Param, Step, Value
from zerograph.planner.explain.check import check_plan
from zerograph.planner.explain.replay import replay, restricted_to_step
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import MOST_LOSS_TILES, head_of, loss_tiles, tiled, why_untiled, with_loss_tiles
from zerograph.planner.programs.coarse import coarse_programs, snapshot
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search
from zerograph.sim.check import check_programs

pytestmark = pytest.mark.costly

GPU, WORLD, MIB = machine_named("h100-80gb"), 8, 2**20
LOGITS, WEIGHT, WORK = 2**32, 2**28, 10**13


def with_head(layers: int = 3, logits: int = LOGITS, returned: bool = False) -> Step:
    """Layers, a product with logits, their logarithms and a loss; the backward of these before that of the layers."""
    step = step_of([Layer(stream=10**7, inside=10**8, flops=10**12)] * layers)
    param = Param("head.weight", (WEIGHT // 4,), "float32", "float32", "float32", True, Layout("rows", 1))

    def op(name: str, phase: str, reads: tuple[str, ...], params: tuple[str, ...] = (), flops: int = 0) -> Op:
        moved = 3 * logits if flops else 0
        return Op(name, name, phase, reads, (name,), params, "model.py:9", "head", flops, moved, not flops)  # type: ignore[arg-type]

    last, own = f"out{layers - 1}", ("head.weight",)
    forward = [
        replace(op("unsharded", "forward", ("shard",), own), cheap=False),
        op("logits", "forward", (last, "unsharded"), own, WORK),
        op("logs", "forward", ("logits",)),
        op("nll", "forward", ("logs",)),
    ]
    backward = [
        op("d_logits", "backward", ("nll", "logs")),
        op("d_weight", "backward", ("d_logits", last), (), WORK),
        replace(op("grad", "backward", ("d_weight",), own), cheap=False),
        op("d_loss", "backward", ("d_logits", "unsharded"), own, WORK),
    ]
    sizes = {"unsharded": WEIGHT, "logits": logits, "logs": logits, "nll": 4, "d_logits": logits, "d_weight": WEIGHT}
    sizes |= {"grad": WEIGHT // WORLD, "d_loss": 10**7, "shard": WEIGHT // WORLD}
    kinds = {"unsharded": "gathered", "grad": "gradient", "shard": "input"}
    values = [Value(name, size, kinds.get(name, "temporary")) for name, size in sizes.items()]  # type: ignore[arg-type]
    there = {"loss", "d_loss"}
    middle = [o for o in step.ops if o.name not in there]
    ops = (
        [o for o in middle if o.phase == "forward"] + forward + backward + [o for o in middle if o.phase == "backward"]
    )
    kept = tuple(v for v in step.values if v.name not in there)
    outputs = ("nll", "logs") if returned else ("nll",)
    return replace(step, ops=ops, values=(*kept, *values), params=(*step.params, param), outputs=outputs)


def test_the_head_is_found_with_all_that_is_as_large() -> None:
    head = head_of(Graph(with_head()))
    assert head is not None
    assert (head.name, head.params, head.bytes) == ("logits", ("head.weight",), LOGITS)
    assert head.large == {"logits", "logs", "d_logits"}
    assert head.weights == {"logits": WEIGHT, "d_weight": 2 * WEIGHT, "d_loss": WEIGHT}
    assert head.sums == {"d_weight"}


def test_logits_that_are_returned_are_untiled() -> None:
    assert head_of(Graph(with_head(returned=True))) is None
    said = why_untiled(with_head(returned=True))
    assert "the forward returns them" in said
    assert "a graph break" in why_untiled(replace(with_head(returned=True), ends_at_break=True))
    assert head_of(Graph(step_of([Layer()] * 2))) is None  # no product behind the layers
    assert head_of(Graph(replace(with_head(), training=False))) is None


@settings(deadline=None, max_examples=examples(30))
@given(tiles=st.integers(2, 64))
def test_a_tile_is_held_and_every_product_but_the_first_runs_once(tiles: int) -> None:
    step = with_head()
    graph = Graph(step)
    head = head_of(graph)
    assert head is not None
    parts = tiled(step, head, tiles)
    sizes = {value.name: value.bytes for value in parts.values}
    assert {sizes[name] for name in head.large} == {-(-LOGITS // tiles)}
    again = {op.name for op in parts.ops if op.again}
    assert again == {"logits", "logs"}
    before, after = ({op.name: op.moved for op in s.ops} for s in (step, parts))
    assert after["logits"] - before["logits"] >= (tiles - 1) * WEIGHT
    assert after["d_weight"] - before["d_weight"] >= 2 * (tiles - 1) * WEIGHT
    assert sum(op.flops for op in parts.ops) == sum(op.flops for op in step.ops)
    packed = {op.name: op.packed for op in parts.ops if op.packed}
    assert packed == dict.fromkeys(("logits", "d_loss"), (tiles - 1) * WEIGHT)  # by hand, the first one's is not told


def test_of_two_heads_the_other_one_is_named() -> None:
    """A projection in front of the head, however wide, is no head."""
    step = with_head()

    def with_product(name: str, reads: tuple[str, ...], then: str = "") -> Step:
        op = Op(name, name, "forward", reads, (name,), ("head.weight",), "model.py:7", "", WORK, 0, False)
        at = next(i for i, op in enumerate(step.ops) if op.name == "logits")
        ops = [replace(o, reads=(then, "unsharded")) if then and o.name == "logits" else o for o in step.ops]
        return replace(step, ops=(*ops[:at], op, *ops[at:]), values=(*step.values, Value(name, LOGITS, "temporary")))

    # Of equal ones the first is in tiles.
    two, wide = with_product("second", ("out2", "unsharded")), with_product("wide", ("out2", "unsharded"), then="wide")
    assert why_untiled(two, tiles=4) == "one head is in tiles, and the products of others are not (model.py:9)"
    assert why_untiled(two) == why_untiled(wide, tiles=4) == why_untiled(step, tiles=4) == ""


def test_gradients_that_the_forward_makes_need_no_logits_again() -> None:
    step = replace(with_head(), loss_gradients=("d_logits", "d_weight", "d_loss"))
    head = head_of(Graph(step))
    assert head is not None
    parts = tiled(step, head, 8)
    assert not any(op.again for op in parts.ops)
    moved = {op.name: op.phase for op in parts.ops if op.name in step.loss_gradients}
    assert set(moved.values()) == {"forward"}
    graph = Graph(parts)
    assert not any(graph.values[value].name in head.large for reads in graph.reads[graph.backward :] for value in reads)


def test_what_only_looks_like_logits_is_left_untiled() -> None:
    step = with_head()
    flat = replace(step, ops=tuple(replace(op, module=op.module.replace(".", "_")) for op in step.ops))
    assert head_of(Graph(flat)) is None  # no repeated layers: the whole network would be a head
    read = tuple(replace(op, reads=(*op.reads, "d_logits")) if op.name == "d_act2" else op for op in step.ops)
    assert head_of(Graph(replace(step, ops=read))) is None  # a layer reads it
    norm = Op("d_norm", "d_norm", "backward", ("d_loss",), ("d_norm",), (), "", "", 0, 0, True)
    at = next(i for i, op in enumerate(step.ops) if op.name == "d_loss")
    ops, values = (*step.ops[: at + 1], norm, *step.ops[at + 1 :]), (*step.values, Value("d_norm", LOGITS, "temporary"))
    head = head_of(Graph(replace(step, ops=ops, values=values)))
    assert head is not None and "d_norm" not in head.large  # made of a product's result, however large


def test_numbers_of_tiles_are_few_and_enough() -> None:
    head = head_of(Graph(with_head()))
    assert head is not None
    assert loss_tiles(head, LOGITS) == ()
    assert loss_tiles(head, LOGITS // 4) == (2, 4)
    assert loss_tiles(head, 1) == (8, MOST_LOSS_TILES)


def test_with_less_memory_than_logits_take_the_loss_is_tiled() -> None:
    step = with_head()
    search = Search(step, Constraints("auto", WORLD, tile=True), GPU)
    uncut, parts = search.best[-1], search.best[0]
    assert uncut.plan.loss_tiles == 1
    assert parts.plan.loss_tiles == MOST_LOSS_TILES
    assert uncut.peak - parts.peak > 1.9 * LOGITS
    assert parts.plan.buckets[-1].tiles == 1  # each tile of tokens reads all of the head's weight
    assert parts.seconds - uncut.seconds > WORK / GPU.matmul["float32"]  # logits are computed twice
    forecast, holdings = forecast_plan(parts.space.scheduler, parts.plan)
    assert "head and loss in 64 tiles" in PlanFile("any", parts.plan, GPU, {}, forecast, holdings).unexecuted
    assert check_plan(step, parts.plan) == []
    untiled = Search(step, Constraints("auto", WORLD), GPU)
    assert {c.plan.loss_tiles for c in untiled.best} == {1}
    assert untiled.best[0].peak > LOGITS


def test_variants_with_the_same_buckets_share_instructions_and_take_the_seconds_that_they_take_alone() -> None:
    search = Search(with_head(), Constraints("auto", WORLD, tile=True), GPU)
    shared = {id(space.scheduler.shared.made) for space in search._every_space}
    assert len(shared) == len({tuple(b.params for b in space.plan.buckets) for space in search._every_space})
    assert len({found.plan.loss_tiles for found in search.best}) > 1
    for found in search.best:
        forecast, _ = forecast_plan(found.space.scheduler.fresh(), found.plan)
        assert (forecast.seconds, forecast.peaks["device"].bytes) == (found.seconds, found.peak)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_updates_run_beside_programs_whose_forward_makes_gradients_of_the_head(overlap: Overlap) -> None:
    """Of a loss in tiles the backward scales and reduces them."""
    placement = Placement("device", "host", "host")
    constraints = Constraints(3, WORLD, bucket_size=MIB, prefetch=1, loss=4)
    step = replace(with_head(), loss_gradients=("d_logits", "d_weight", "grad", "d_loss"))
    search = Search(step, constraints, GPU)
    space = next(space for space in search.spaces if space.plan.loss_tiles == 4)
    buckets = tuple(replace(bucket, placement=placement) for bucket in space.plan.buckets)
    plan = replace(space.plan, buckets=buckets, overlap=overlap)
    programs = snapshot(coarse_programs(space.scheduler, plan))
    head = len(buckets) - 1
    reduced = [{each.bucket for each in program.instructions if isinstance(each, Reduce)} for program in programs]
    assert reduced == [set(), set(range(head + 1)), set()]
    assert check_programs(programs, plan) == []


def test_tiles_of_a_loss_that_is_not_there_are_found() -> None:
    step = step_of([Layer()] * 2)
    plan = replace(plan_step(step, stage=3, world_size=2, bucket_size=MIB, prefetch=1), loss_tiles=4)
    assert [v.message for v in check_plan(step, plan)] == [
        "the loss is in 4 tiles, and the step has none behind logits of its own"
    ]
    assert list(Plan(3, 2, (), 1, loss_tiles=0).mistakes()) == ["0 tiles of the loss"]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["auto", "optimizer"])
def test_more_memory_is_never_slower_with_tiles_of_the_loss(offload: str) -> None:
    search = Search(with_head(), Constraints("auto", WORLD, offload=offload), GPU)  # type: ignore[arg-type]
    assert {c.plan.loss_tiles for c in search.best} > {1}
    low, high = search.best[0].peak, search.best[-1].peak
    last = float("inf")
    for share in range(11):
        found = search.within(dict.fromkeys(TIERS, 2**62) | {"device": low + share * (high - low) // 10})
        assert found is not None
        assert found.seconds <= last
        last = found.seconds


@pytest.mark.parametrize("recompute", ["full", 0.5])
def test_what_is_left_open_is_never_slower_than_what_is_fixed(recompute: str | float) -> None:
    """With the loss in tiles, too: single activations and kept buckets are as free as where it is whole."""
    step = with_head(layers=12)
    search = Search(step, Constraints("auto", WORLD, tile=True), GPU)
    fixed = Search(step, Constraints("auto", WORLD, tile=True, recompute=recompute), GPU)  # type: ignore[arg-type]
    assert any(c.plan.loss_tiles > 1 and any(c.space.scheduler.options(c.plan)) for c in search.best)
    low, high = search.best[0].peak, fixed.best[-1].peak
    for share in range(21):
        budget = low + share * (high - low) // 20
        free, forced = search.within(budget), fixed.within(budget)
        assert free is not None
        assert forced is None or free.seconds <= forced.seconds * 1.01, share


def test_tiles_of_the_loss_are_replayed() -> None:
    step = with_head()
    step = replace(step, ops=tuple(replace(op, activation="head:mm") if op.name == "logits" else op for op in step.ops))
    head = head_of(Graph(step))
    assert head is not None
    plan = with_loss_tiles(plan_step(step, stage=3, world_size=WORLD, bucket_size=MIB, prefetch=1), head, 4)
    alone = replay(GivenPlan("plan.json", plan), replace(step, params=()))
    assert alone == replace(plan, buckets=()) and alone.loss_tiles == 4
    # Of a plan by sample the loss is left whole where logits exist for all tokens, and of others that is an error.
    untiled, by_sample = replace(step, untiled_logits="they are returned"), replace(plan, by_sample=True)
    assert replay(GivenPlan("plan.json", by_sample), untiled) == by_sample
    assert restricted_to_step(by_sample, untiled).loss_tiles == 1
    with pytest.raises(ConfigError, match="the loss is in 4 tiles, and the step has none"):
        replay(GivenPlan("plan.json", plan), untiled)
