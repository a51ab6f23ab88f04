"""Layers in tiles of tokens: what is wide is held a tile at a time, in layers that are recomputed and whose weights are
at hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from planner.steps import Layer, step_of

from zerograph.core.config import Config
from zerograph.core.errors import ConfigError
from zerograph.core.machine import machine_named
from zerograph.core.plan import GivenPlan, Placement, Plan
from zerograph.core.step import Step, TokenRegion
from zerograph.planner.explain.check import check_plan
from zerograph.planner.explain.replay import replay, restricted_to_step
from zerograph.planner.profile.regions import profile
from zerograph.planner.profile.token_tiles import TOKEN_TILES, by_token, in_token_tiles, tiles_to_try, with_token_tiles
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search

GPU, WORLD, MIB = machine_named("h100-80gb"), 2, 2**20
STREAM, INSIDE, ROWS, WEIGHT = 10**7, 10**9, 2**20, 2**28
SOME = {"blocks.1.weight": 2}


def wide(layers: int = 3) -> Step:
    """Layers whose inside is a hundred times their stream, by token."""
    step = step_of([Layer(rows=ROWS, stream=STREAM, inside=INSIDE, flops=10**12)] * layers)
    regions = []
    for i in range(layers):
        names = tuple(v.name for v in step.values if v.bytes == INSIDE and v.name.strip("upactd_") == str(i))
        assert len(names) >= 3
        moved = ((f"up{i}", WEIGHT), (f"down{i}", WEIGHT))
        regions.append(TokenRegion(f"blocks.{i}", f"blocks.{i}:up", (f"blocks.{i}.weight",), names, moved))
    return replace(step, token_regions=tuple(regions))


def ruled(step: Step, recompute: str | float = "full", **options: object) -> Plan:
    return plan_step(step, stage=3, world_size=WORLD, bucket_size=MIB, prefetch=1, recompute=recompute, **options)  # type: ignore[arg-type]


def test_recomputed_layers_are_in_tiles_unless_tiles_of_their_weights_leave() -> None:
    step = wide()
    every = with_token_tiles(ruled(step), step, 4)
    assert (every.token_tiles, every.token_regions) == (4, ("blocks.0:up", "blocks.1:up", "blocks.2:up"))
    assert check_plan(step, every) == [] and Plan.from_json(every.to_json()) == every
    both = with_token_tiles(ruled(step, tiles=SOME), step, 4)
    assert both.token_regions == every.token_regions and check_plan(step, both) == []
    left = ("blocks.0:up", "blocks.2:up")
    assert with_token_tiles(ruled(step, tiles=SOME), step, 4, leaves=True).token_regions == left
    for away in (Placement("nvme", "nvme", "nvme"), Placement("device", "device", "host")):
        assert with_token_tiles(ruled(step, tiles=SOME, placement=away), step, 4).token_regions == left
        moved = replace(both, buckets=tuple(replace(b, placement=away) for b in both.buckets))
        assert [v.message for v in check_plan(step, moved)] == [
            "blocks.1:up is in tiles of tokens, and a weight that each of them moves is in tiles"
        ]
    third = with_token_tiles(ruled(step, 0.34), step, 4)
    assert third.token_regions == tuple(f"{layer}:up" for layer in third.recompute) and len(third.recompute) == 1
    assert with_token_tiles(ruled(step, "none"), step, 4).token_tiles == 1
    assert with_token_tiles(ruled(step), step, 1) == ruled(step)


def test_who_asks_for_tiles_hears_why_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    step = wide()
    in_token_tiles(ruled(step), step, 4)
    assert caplog.text == ""
    tiles = {f"blocks.{i}.weight": 2 for i in range(3)}
    in_token_tiles(ruled(step, tiles=tiles, placement=Placement("nvme", "nvme", "nvme")), step, 4)
    why = "because the weights of their MLPs are in tiles, and do not live on the device"
    assert f"token_tiles=4: layers run for all tokens at once, {why}" in caplog.text
    in_token_tiles(ruled(step), replace(step, token_regions=()), 4)
    assert "because none has an MLP of linear layers" in caplog.text


def test_a_tile_of_what_is_inside_is_held_and_weights_are_read_by_each() -> None:
    step = wide()
    tiled = by_token(step, step.token_regions[1:2], 4)
    sizes, before = ({v.name: v.bytes for v in one.values} for one in (tiled, step))
    assert {name for name in sizes if sizes[name] != before[name]} == set(step.token_regions[1].values)
    assert all(sizes[name] == INSIDE // 4 for name in step.token_regions[1].values)
    ops, was = ({op.name: op for op in one.ops} for one in (tiled, step))
    assert {name for name, op in ops.items() if op.token_tiles == 4} >= {"up1", "act1", "d_up1", "d_full1"}
    changed = {name: ops[name].moved - was[name].moved for name in ops}
    # Weights three times more; what is inside is read and written as before, which its sizes no longer tell.
    assert {name: size for name, size in changed.items() if size} == dict.fromkeys(
        ("up1", "down1"), 3 * WEIGHT + INSIDE * 3 // 4
    )


def test_with_less_memory_than_one_layer_takes_tokens_are_in_tiles() -> None:
    step = wide()
    untiled = Search(step, Constraints(3, WORLD, recompute="full"), GPU)
    assert {c.plan.token_tiles for c in untiled.best} == {1}
    parts = Search(step, Constraints(3, WORLD, tokens="auto"), GPU)
    assert {c.plan.token_tiles for c in parts.best} == {1, *TOKEN_TILES}
    budget = untiled.smallest.peak - INSIDE
    assert untiled.within(budget) is None
    found = parts.within(budget)
    assert found is not None and found.plan.token_tiles == TOKEN_TILES[0]  # as few as fit
    assert found.plan.recompute == ("blocks.0", "blocks.1", "blocks.2") and check_plan(step, found.plan) == []
    last = float("inf")
    low, high = parts.best[0].peak, parts.best[-1].peak
    for share in range(11):
        best = parts.within(low + share * (high - low) // 10)
        assert best is not None and best.seconds <= last
        last = best.seconds


def test_tiles_of_tokens_that_were_given_are_searched_alone() -> None:
    step = wide()
    given = Constraints.of(Config.of(stage=3, token_tiles=8, memory="80GiB"), WORLD)
    assert {c.plan.token_tiles for c in Search(step, given, GPU).best} == {8}
    one = Constraints.of(Config.of(stage=3, token_tiles=1, memory="80GiB"), WORLD)
    assert {c.plan.token_tiles for c in Search(step, one, GPU).best} == {1}


def test_a_plan_of_another_step_is_refused_or_restricted() -> None:
    step = wide()
    plan = with_token_tiles(ruled(step), step, 4)
    other = replace(step, token_regions=step.token_regions[1:])
    assert [v.message for v in check_plan(other, plan)] == [
        "blocks.0:up is in 4 tiles of tokens, and needs all at once"
    ]
    assert restricted_to_step(plan, other).token_regions == ("blocks.1:up", "blocks.2:up")
    assert restricted_to_step(plan, replace(step, token_regions=())).token_tiles == 1
    with pytest.raises(ConfigError, match=r"blocks.0:up is in 4 tiles of tokens, and needs all at once"):
        replay(GivenPlan("plan.json", plan), other)
    assert replay(GivenPlan("plan.json", plan), step) == plan
    evaluation = replay(GivenPlan("plan.json", plan), replace(step, training=False))
    assert (evaluation.token_tiles, evaluation.token_regions) == (1, ())


def test_one_process_that_moves_no_parameters_replays_what_is_decided_of_activations() -> None:
    """Its parameters are the user's own, and in no bucket."""
    step = wide()
    plan = with_token_tiles(ruled(step), step, 4)
    alone = replay(GivenPlan("plan.json", plan), replace(step, params=()))
    assert alone == replace(plan, buckets=()) and alone.recompute
    behind = replace(step, params=(), ops=tuple(op for op in step.ops if not op.module), token_regions=())
    broken = replay(GivenPlan("plan.json", plan), behind)  # what a graph break leaves without layers
    assert (broken.recompute, broken.token_tiles, broken.token_regions) == ((), 1, ())


def by_samples(step: Step, samples: int = 8) -> Step:
    return replace(step, token_regions=tuple(replace(region, samples=samples) for region in step.token_regions))


def test_regions_of_whole_samples_are_others_and_share_a_bucket_with_their_layer() -> None:
    step = by_samples(wide())
    plan = ruled(step, whole_layers=True)
    assert [len({p.name.rpartition(".")[0] for p in b.params}) for b in plan.buckets] == [1] * len(plan.buckets)
    parts = with_token_tiles(plan, step, 4, by_sample=True)
    assert parts.by_sample and parts.token_tiles == 4 and len(parts.token_regions) == 3
    assert check_plan(step, parts) == [] and Plan.from_json(parts.to_json()) == parts
    assert with_token_tiles(plan, step, 4) == plan  # no region is of tokens
    wrong = {found.check for found in check_plan(wide(), parts)}
    assert wrong == {"tokens"}
    assert list(replace(plan, by_sample=True).mistakes()) == ["tiles of whole samples, of which there is one"]


def test_numbers_of_tiles_that_are_looked_at() -> None:
    step = wide()
    assert list(tiles_to_try(step)) == [(4, False), (16, False)]
    both = replace(step, token_regions=(*step.token_regions, *by_samples(step).token_regions))
    assert list(tiles_to_try(both)) == [(4, False), (16, False), (4, True), (8, True)]
    assert list(tiles_to_try(by_samples(step, samples=2))) == [(2, True)]


def test_a_search_takes_parts_of_the_batch_where_tokens_can_not_be_divided() -> None:
    step = by_samples(wide())
    constraints = Constraints("auto", WORLD, recompute="full", tokens="auto")
    search = Search(step, constraints, GPU)
    assert search.smallest.plan.by_sample and search.smallest.plan.token_tiles == 8
    whole = Search(step, replace(constraints, tokens=None), GPU)
    assert search.smallest.peak < whole.smallest.peak - INSIDE
    fixed = Search(step, replace(constraints, tokens=2, by_sample=True), GPU)
    assert {(one.plan.token_tiles, one.plan.by_sample) for one in fixed.best} == {(2, True)}


def test_layers_in_parts_of_the_batch_save_as_much_as_fits() -> None:
    step = by_samples(wide())
    search = Search(step, Constraints(3, WORLD, tokens=4, by_sample=True), GPU)
    assert all(len(one.plan.token_regions) == 3 for one in search.best)
    saving = {len(one.plan.save): one for one in reversed(search.best)}
    assert set(saving) == {0, 1, 2, 3}
    for some, more in pairwise(range(4)):
        assert saving[more].seconds < saving[some].seconds
        # Of what a layer saves all samples are there, of what it makes again a part.
        assert saving[more].peak - saving[some].peak == pytest.approx(INSIDE * (3 / 4 if some == 0 else 1), rel=0.01)
    for one in search.best:
        assert check_plan(step, one.plan) == []


def test_what_is_saved_of_parts_is_whole_and_a_part_of_it_is_held_where_it_is_made() -> None:
    step = by_samples(wide())
    lives = profile(by_token(step, step.token_regions, 4), "none").lives
    inside = [life for life in lives if life.activation and life.bytes >= INSIDE]
    assert len(inside) >= 3
    assert all(life.made == life.bytes // 4 and {size for _, size in life.members} == {0} for life in inside)
    assert all(life.made == life.bytes for life in profile(step, "none").lives)


def test_who_asks_for_parts_hears_which_layer_is_whole_and_why(caplog: pytest.LogCaptureFixture) -> None:
    step = by_samples(wide())
    mixed = replace(step, token_regions=step.token_regions[::2], whole_batches=(("blocks.1", "it mixes (model.py:3)"),))
    in_token_tiles(ruled(mixed, whole_layers=True), mixed, 4, by_sample=True)
    in_token_tiles(ruled(step, tiles={"blocks.2.weight": 2}), step, 4, by_sample=True)
    in_token_tiles(ruled(step, whole_layers=True), step, 4, by_sample=True)
    assert caplog.messages == [
        "batch_tiles=4 leaves 1 of 3 layers whole, blocks.1 because it mixes (model.py:3)",
        "batch_tiles=4 leaves 1 of 3 layers whole, blocks.2 because its weights are in tiles",
    ]
