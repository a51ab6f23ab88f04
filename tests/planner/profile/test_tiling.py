"""Which parameters are in tiles as the user wants them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from planner.steps import Layer, step_of

from zerograph.core.config import Config
from zerograph.core.errors import ConfigError
from zerograph.core.machine import machine_named
from zerograph.core.plan import GivenPlan, Placement, Plan
from zerograph.core.step import Mlp, Step
from zerograph.planner import plan_step
from zerograph.planner.explain.check import check_plan
from zerograph.planner.explain.replay import replay
from zerograph.planner.profile.tiling import in_loops, looped, not_looped, refuse_unknown, tiles_wanted
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search


def _step() -> Step:
    step = step_of([Layer(rows=1024), Layer(rows=64)])
    params = tuple(replace(p, shape=(p.elements // 4, 4)) for p in step.params)
    return replace(step, params=params, tilable=tuple(p.name for p in params))


def test_a_number_is_for_all_that_are_larger_than_a_bucket() -> None:
    step = _step()
    large, small = (p for p in step.params if len(p.shape) > 1)
    assert tiles_wanted(4, step, 2, small.gathered_bytes) == {large.name: 4}
    assert tiles_wanted(4, step, 2, small.gathered_bytes - 1) == {large.name: 4, small.name: 4}
    assert tiles_wanted(4, replace(step, tilable=()), 2, 1) == {}
    for none in ("auto", "off", 1):
        assert tiles_wanted(none, step, 2, 1) == {}  # type: ignore[arg-type]


def test_of_patterns_the_first_counts() -> None:
    step = _step()
    first, second = (p.name for p in step.params if len(p.shape) > 1)
    assert tiles_wanted(((first, 2), ("*", 3)), step, 2, 2**30) == {first: 2, second: 3}
    assert tiles_wanted(((first, 1), ("*", 3)), step, 2, 2**30) == {second: 3}


def test_what_cannot_be_is_refused() -> None:
    step = _step()
    small = [p for p in step.params if len(p.shape) > 1][1]
    with pytest.raises(ConfigError, match=rf"wants {small.name} .* in 40 tiles, and each of 2 ranks has 8 rows"):
        tiles_wanted(((small.name, 40),), step, 2, 1)
    with pytest.raises(
        ConfigError, match=rf"wants {small.name} .* in 2 tiles, and not only products and lookups use it"
    ):
        tiles_wanted(((small.name, 2),), replace(step, tilable=()), 2, 1)
    with pytest.raises(ConfigError, match=r"the pattern 'no.*', and no parameter of the model is called so"):
        refuse_unknown((("*", 2), ("no.*", 2)), [small.name])
    refuse_unknown((("no.*", 2),), ())  # no parameters are known yet


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "many", {}, {"*": 0}, {3: 4}, None])
def test_what_tile_may_be(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tile must be"):
        Config.of(tile=wrong)


def test_tiles_need_stage_3_and_no_plan() -> None:
    with pytest.raises(ConfigError, match="tile=4 at stage 2, which keeps parameters whole"):
        Config.of(tile=4, stage=2)
    with pytest.raises(ConfigError, match=r"tile given beside plan='p.json'"):
        Config.of(tile=4, plan="p.json")
    assert Config.of(tile={"a.*": 2}, stage="auto").tile == (("a.*", 2),)


def test_each_has_a_bucket_of_its_own_in_the_order_of_use() -> None:
    step = _step()
    tiles = tiles_wanted((("*", 4),), step, 2, 2**30)
    plan = plan_step(step, stage=3, world_size=2, bucket_size=2**30, prefetch=1, tiles=tiles)
    assert {b.params[0].name: b.tiles for b in plan.buckets if b.tiles > 1} == tiles
    assert sorted(p.name for b in plan.buckets for p in b.params) == sorted(p.name for p in step.params)
    assert not list(plan.mistakes())


def test_a_search_keeps_to_what_is_fixed() -> None:
    step, machine = _step(), machine_named("cpu")
    for stage, (wanted, number) in product((3, "auto"), ((4, 4), ({"*": 2}, 2), ("off", 1))):
        constraints = Constraints.of(Config.of(stage=stage, tile=wanted, bucket_size=4, memory="1GiB"), 2)
        plan = Search(step, constraints, machine).best[0].plan
        assert not list(plan.mistakes())
        assert {b.tiles for b in plan.buckets if len(b.params[0].shape) > 1} == {number}


def _mlp(tiles: tuple[int, int] = (4, 4), **options: Any) -> tuple[Step, Plan]:
    """A step whose two large weights are an MLP of 64 hidden places, and a plan by rule with them in ``tiles``."""
    step = step_of([Layer(rows=1024), Layer(rows=1024)])
    names = [p.name for p in step.params if p.elements >= 1024]
    shapes = dict(zip(names, ((64, 16), (16, 64)), strict=True))
    params = tuple(replace(p, shape=shapes.get(p.name, p.shape)) for p in step.params)
    first = next(op for op in step.passes if op.phase == "forward" and op.flops)
    mlp = Mlp("mlp", 64, tuple(zip(names, (0, 1), strict=True)), (first.name,))
    step = replace(step, params=params, tilable=tuple(names), mlps=(mlp,))
    wanted = {name: count for name, count in zip(names, tiles, strict=True) if count > 1}
    plan = plan_step(step, stage=3, world_size=2, bucket_size=4, prefetch=1, tiles=wanted, **options)
    return step, plan


def _cuts(plan: Plan) -> list[tuple[int, int, str]]:
    return [(b.tiles, b.dim, b.loop) for b in plan.buckets if b.tiles > 1]


def test_weights_of_an_mlp_in_as_many_tiles_run_in_one_loop() -> None:
    step, plan = _mlp()
    found = in_loops(plan, step)
    assert _cuts(found) == [(4, 0, "mlp"), (4, 1, "mlp")]
    assert not list(found.mistakes()) and not check_plan(step, found)
    assert Plan.from_json(found.to_json()) == found
    assert not_looped(plan, step) == not_looped(found, step) == {}


@pytest.mark.parametrize(
    ("tiles", "options", "why"),
    [
        ((4, 2), {}, "its weights are in different numbers of tiles"),
        ((4, 1), {}, "its weights are in different numbers of tiles"),
        (
            (4, 4),
            {"placement": Placement("nvme", "nvme", "nvme")},
            "tiles of columns are not read and written piece by piece",
        ),
        ((4, 4), {"placement": Placement("device", "device", "host")}, "tiles of columns are not read and written"),
    ],
)
def test_elsewhere_each_weight_has_tiles_of_its_rows(tiles: tuple[int, int], options: Any, why: str) -> None:
    step, plan = _mlp(tiles, **options)
    assert in_loops(plan, step) == plan
    assert list(not_looped(plan, step)) == ["mlp"] and not_looped(plan, step)["mlp"].startswith(why)


def test_nothing_is_said_of_an_mlp_that_is_untiled() -> None:
    step, plan = _mlp((1, 1))
    assert in_loops(plan, step) == plan
    assert not_looped(plan, step) == {}


def test_of_a_middle_a_loop_holds_two_tiles() -> None:
    step, plan = _mlp((8, 8))
    name = step.mlps[0].middle[0]
    found = looped(step, in_loops(plan, step))
    sizes = [{v.name: v.bytes for v in one.values}[name] for one in (step, found)]
    assert sizes[1] == -(-sizes[0] // 4)
    assert next(op for op in found.ops if op.name == name).again
    assert looped(step, plan) is step


def test_what_the_middle_saved_is_saved_no_more() -> None:
    step, plan = _mlp()
    name = step.mlps[0].middle[0]
    ops = tuple(replace(op, activation="layers.0:mm") if op.name == name else op for op in step.ops)
    kept = replace(plan, save=("layers.0:mm",), offload=(("layers.0:mm", "nvme"),))
    found = in_loops(kept, replace(step, ops=ops))
    assert (found.save, found.offload) == ((), ())


def test_plans_with_loops_that_the_step_has_not_are_refused() -> None:
    step, plan = _mlp()
    found = in_loops(plan, step)
    other = replace(step, mlps=())
    assert any("they are no MLP that can be" in violation.message for violation in check_plan(other, found))
    with pytest.raises(ConfigError, match=r"mlp is in one loop over rows of .* and columns of .*"):
        replay(GivenPlan("p.json", found), other)
    evaluated = replay(GivenPlan("p.json", found), replace(other, training=False))
    assert [(tiles, dim) for tiles, dim, _ in _cuts(evaluated)] == [(4, 0), (4, 0)]
    assert replay(GivenPlan("p.json", found), step) == found


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"loop": ""}, "has tiles of columns, which a loop alone has"),
        ({"tiles": 2}, "the loop mlp has tiles of several kinds"),
        ({"tiles": 33}, "has 33 tiles of 32 columns"),
        ({"dim": 2}, "has tiles of its dimension 2"),
        ({"tiles": 1}, "is whole, and runs in the loop 'mlp'"),
        (
            {"placement": Placement("nvme", "nvme", "nvme")},
            "where tiles of columns would be read and written piece by piece",
        ),
    ],
)
def test_mistakes_of_loops(change: dict[str, Any], wrong: str) -> None:
    step, plan = _mlp()
    plan = in_loops(plan, step)
    at = next(b.index for b in plan.buckets if b.dim == 1)
    buckets = tuple(replace(b, **change) if b.index == at else b for b in plan.buckets)
    assert any(wrong in text for text in replace(plan, buckets=buckets).mistakes())
