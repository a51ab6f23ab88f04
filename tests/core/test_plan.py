"""Plans as plain data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.errors import ZeroGraphError
from zerograph.core.layout import Layout
from zerograph.core.machine import TIERS
from zerograph.core.plan import Bucket, Placement, Plan
from zerograph.core.step import Param

_DTYPES = st.sampled_from(["float32", "bfloat16", "float64"])
_PARAMS = st.builds(
    Param,
    name=st.text(min_size=1),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=_DTYPES,
    compute_dtype=_DTYPES,
    reduce_dtype=_DTYPES,
    trainable=st.booleans(),
    home=st.builds(Layout, st.sampled_from(["rows", "whole"]), st.integers(1, 4)),
)
_TIERS = st.sampled_from(TIERS)
_BUCKETS = st.builds(
    Bucket,
    index=st.integers(0, 100),
    name=st.text(),
    params=st.lists(_PARAMS, max_size=3).map(tuple),
    residency=st.sampled_from(["use", "backward", "step"]),
    placement=st.builds(Placement, _TIERS, _TIERS, _TIERS),
    tiles=st.integers(1, 4),
    ahead=st.none() | st.integers(-1, 9),
)
_LAYERS = st.text() | st.sampled_from(["h.0", "h.1"])
_PLANS = st.builds(
    Plan,
    stage=st.integers(0, 3),
    world_size=st.integers(1, 4096),
    buckets=st.lists(_BUCKETS, max_size=4).map(tuple),
    prefetch=st.integers(0, 8),
    recompute=st.lists(_LAYERS, max_size=3).map(tuple),
    save=st.lists(st.builds("{}:{}".format, _LAYERS, st.text()), max_size=3).map(tuple),
    save_others=st.booleans(),
    offload=st.lists(st.tuples(st.text(), st.sampled_from(TIERS[1:])), max_size=3).map(tuple),
)


@given(plan=_PLANS)
def test_a_plan_read_back_from_json_equals_itself_or_is_refused(plan: Plan) -> None:
    wrong = next(plan.mistakes(), "")
    if wrong:
        with pytest.raises(ZeroGraphError) as info:
            Plan.from_json(plan.to_json())
        assert f"the plan makes no sense: {wrong}" in str(info.value)
        return
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert "\n" not in plan.to_json()


@given(one=_PLANS, other=_PLANS)
def test_plans_that_differ_have_different_digests(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.digest == other.digest)


def test_another_version_is_refused() -> None:
    data = json.loads(Plan(3, 2, (), 1).to_json())
    for version in (4, 99, None):
        with pytest.raises(ZeroGraphError, match=f"plan has version {version}, this ZeroGraph reads 17"):
            Plan.from_json(json.dumps({**data, "version": version}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 6}', '{"version": 6, "buckets": 3}', "null"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ZeroGraphError, match="plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("key", ["save", "recompute", "token_regions"])
def test_names_are_text(key: str) -> None:
    data = json.loads(Plan(3, 2, (), 1).to_json()) | {key: [1]}
    with pytest.raises(ZeroGraphError, match="1 is no name"):
        Plan.from_json(json.dumps(data))


WRONG: list[tuple[str, object]] = [
    *((name, value)
      for name in ("stage", "world_size", "prefetch", "reductions", "fetch_ahead", "loss_tiles", "token_tiles")
      for value in (1.5, True, "2", None)),
    ("save_others", "no"), ("save", "h.0:mm"), ("recompute", "h.0"), ("token_regions", "h.0:mm"),
    ("offload", {}), ("buckets", None), ("more", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_is_of_another_type_is_refused(name: str, value: object) -> None:
    data = json.loads(Plan(3, 2, (), 1).to_json())
    with pytest.raises(ZeroGraphError, match="the plan is incomplete: .*" + name):
        Plan.from_json(json.dumps({**data, name: value}))


def test_a_scalar_has_no_rows_for_tiles() -> None:
    scalar = Param("s", (), "float32", "float32", "float32", True, Layout("rows", 2))
    plan = Plan(3, 2, (Bucket(0, "s", (scalar,), "use", tiles=2),), 1)
    assert list(plan.mistakes()) == ["bucket s is tiled, and is not one sharded parameter"]


def test_what_is_missing_is_not_made_up() -> None:
    data = json.loads(Plan(3, 2, (), 1).to_json())
    del data["reductions"]
    with pytest.raises(ZeroGraphError, match="reductions"):
        Plan.from_json(json.dumps(data))


def test_bytes_and_lookup() -> None:
    a = Param("a", (4, 4), "float32", "bfloat16", "float32", True, Layout("rows", 2))
    b = Param("b", (2,), "float32", "float32", "float32", True, Layout("whole", 2))
    bucket = Bucket(0, "both", (a, b), "use")
    assert bucket.gathered_bytes == 16 * 2 + 2 * 4
    assert Plan(3, 2, (bucket,), 1).bucket_of() == {"a": bucket, "b": bucket}


def test_what_is_saved_belongs_to_a_layer_that_is_recomputed() -> None:
    plan = Plan(3, 2, (), 1, ("h.0",), ("h.0.mlp:mm",))
    assert list(plan.mistakes()) == []
    assert Plan.from_json(plan.to_json()) == plan
    other, twice = replace(plan, save=("h.1:mm",)), replace(plan, save=("h.0:mm", "h.0:mm"))
    assert list(other.mistakes()) == ["h.1:mm is saved, of a layer that is not recomputed"]
    assert list(twice.mistakes()) == ["h.0:mm is saved twice"]


@pytest.mark.parametrize(
    ("regions", "tiles", "wrong"),
    [
        (("h.0:mm",), 1, "1 tiles of tokens of 1 layer"),
        ((), 2, "2 tiles of tokens of 0 layers"),
        (("h.0:mm", "h.0:mm"), 2, "h.0:mm runs by token twice"),
        (("h.1:mm",), 2, "h.1:mm runs by token, of a layer that is not recomputed"),
    ],
)
def test_layers_in_tiles_of_tokens_are_recomputed_ones(regions: tuple[str, ...], tiles: int, wrong: str) -> None:
    plan = Plan(3, 2, (), 1, recompute=("h.0",), token_tiles=tiles, token_regions=regions)
    assert list(plan.mistakes()) == [wrong]
