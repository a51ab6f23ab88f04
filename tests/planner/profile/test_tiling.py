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
from zerograph.core.step import Step
from zerograph.planner.profile.tiling import refuse_unknown, tiles_wanted
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search


def _step() -> Step:
    step = step_of([Layer(rows=1024), Layer(rows=64)])
    params = tuple(replace(p, shape=(p.elements // 4, 4)) for p in step.params)
    return replace(step, params=params, tilable=tuple(p.name for p in params)).over(2)


def test_a_number_is_for_all_that_are_larger_than_a_bucket() -> None:
    step = _step()
    large, small = (p for p in step.params if len(p.shape) > 1)
    assert tiles_wanted(4, step, small.gathered_bytes) == {large.name: 4}
    assert tiles_wanted(4, step, small.gathered_bytes - 1) == {large.name: 4, small.name: 4}
    assert tiles_wanted(4, replace(step, tilable=()), 1) == {}
    for none in ("auto", "off", 1):
        assert tiles_wanted(none, step, 1) == {}  # type: ignore[arg-type]


def test_of_patterns_the_first_counts() -> None:
    step = _step()
    first, second = (p.name for p in step.params if len(p.shape) > 1)
    assert tiles_wanted(((first, 2), ("*", 3)), step, 2**30) == {first: 2, second: 3}
    assert tiles_wanted(((first, 1), ("*", 3)), step, 2**30) == {second: 3}


def test_what_cannot_be_is_refused() -> None:
    step = _step()
    small = [p for p in step.params if len(p.shape) > 1][1]
    with pytest.raises(ConfigError, match=rf"wants {small.name} .* in 40 tiles, and each of 2 ranks has 8 rows"):
        tiles_wanted(((small.name, 40),), step, 1)
    with pytest.raises(
        ConfigError, match=rf"wants {small.name} .* in 2 tiles, and not only products and lookups use it"
    ):
        tiles_wanted(((small.name, 2),), replace(step, tilable=()), 1)
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
    tiles = tiles_wanted((("*", 4),), step, 2**30)
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
