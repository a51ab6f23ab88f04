"""The rules by which parameters are put into buckets."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.config import Recompute
from zerograph.core.layout import Layout
from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.step import Op, Param, Step
from zerograph.planner.programs.rules import layer_of_param, plan_step


def param(name: str, rows: int, dtype: str = "float32") -> Param:
    """A trainable parameter of ``rows`` elements."""
    return Param(name, (rows,), dtype, dtype, dtype, True, Layout("rows", 4))


def planned(params: list[Param], limit: int, stage: int = 3) -> Plan:
    step = Step(ops=(), values=(), params=tuple(params), training=True)
    return plan_step(step, stage=stage, world_size=4, bucket_size=limit, prefetch=1)


_MODULES = ["embed", "norm", *(f"layers.{i}.{m}" for i in range(4) for m in ("attn", "mlp.up", "mlp.down"))]
_MODEL = st.lists(
    st.tuples(st.sampled_from(_MODULES), st.sampled_from(["weight", "bias", "scale"]), st.integers(1, 400)),
    unique_by=lambda p: p[:2],
    max_size=40,
).map(lambda found: [param(f"{module}.{name}", rows) for module, name, rows in found])


@given(params=_MODEL, limit=st.integers(4, 4000), stage=st.sampled_from([0, 1, 2, 3]))
def test_every_parameter_is_in_exactly_one_bucket_in_order(params: list[Param], limit: int, stage: int) -> None:
    plan = planned(params, limit, stage)
    assert [p for b in plan.buckets for p in b.params] == params
    assert [b.index for b in plan.buckets] == list(range(len(plan.buckets)))
    assert all(b.params for b in plan.buckets)
    assert plan == planned(params, limit, stage)


@given(params=_MODEL, limit=st.integers(4, 4000))
def test_a_bucket_exceeds_the_limit_only_for_one_large_parameter(params: list[Param], limit: int) -> None:
    for bucket in planned(params, limit).buckets:
        assert bucket.gathered_bytes <= limit or len(bucket.params) == 1


@given(params=_MODEL, limit=st.integers(4, 4000))
def test_the_size_of_a_parameter_never_moves_earlier_ones(params: list[Param], limit: int) -> None:
    """Buckets are made front to back: what comes later cannot regroup what came before, but for the last bucket."""
    whole = [b.params for b in planned(params, limit).buckets]
    for cut in range(len(params)):
        part = [b.params for b in planned(params[:cut], limit).buckets]
        assert part[:-1] == whole[: max(0, len(part) - 1)] or _split_module(params, cut)


def _split_module(params: list[Param], cut: int) -> bool:
    """Whether ``cut`` falls inside a module, whose parameters are placed together."""
    return cut > 0 and params[cut - 1].name.rpartition(".")[0] == params[cut].name.rpartition(".")[0]


def test_repeated_layers_are_buckets_of_equal_shape() -> None:
    params = [param("embed.weight", 500)]
    params += [param(f"layers.{i}.{n}", 100) for i in range(3) for n in ("norm.weight", "mlp.weight", "mlp.bias")]
    params += [param("norm.weight", 100), param("head.weight", 500)]
    names = [(b.name, len(b.params)) for b in planned(params, 1200).buckets]
    assert names == [("embed", 1), ("layers.0", 3), ("layers.1", 3), ("layers.2", 3), ("norm", 1), ("head", 1)]


def test_small_neighbours_travel_together() -> None:
    params = [param(f"layers.{i}.norm.weight", 4) for i in range(3)]
    (bucket,) = planned(params, 1024).buckets
    assert bucket.name == "layers.0 .. layers.2"


def test_a_layer_larger_than_the_limit_is_split_between_modules() -> None:
    params = [param(f"layers.0.{n}", 100) for n in ("q.weight", "q.bias", "k.weight", "k.bias", "v.weight")]
    buckets = planned(params, 1000).buckets
    assert [[p.name for p in b.params] for b in buckets] == [
        ["layers.0.q.weight", "layers.0.q.bias"],
        ["layers.0.k.weight", "layers.0.k.bias"],
        ["layers.0.v.weight"],
    ]


def test_residency_follows_the_stage() -> None:
    for stage, residency in ((0, "step"), (1, "step"), (2, "step"), (3, "use")):
        assert {b.residency for b in planned([param("w", 8)], 64, stage).buckets} == {residency}


def test_no_parameters_no_buckets() -> None:
    assert planned([], 64).buckets == ()


def test_layers() -> None:
    assert layer_of_param("model.layers.3.mlp.weight") == "model.layers.3"
    assert layer_of_param("blocks.0.experts.7.up.weight") == "blocks.0"
    assert layer_of_param("embed.weight") == ""
    assert layer_of_param("weights.0") == ""  # an entry of a ParameterList is no layer


def recomputed(recompute: Recompute, modules: list[str], training: bool = True, saved: Tier = "device") -> Plan:
    ops = tuple(Op(f"op{i}", "mm", "forward", (), (f"op{i}",), module=module) for i, module in enumerate(modules))
    step = Step(ops=ops, values=(), params=(), training=training)
    return plan_step(step, stage=3, world_size=4, bucket_size=64, prefetch=1, recompute=recompute, saved=saved)


_LAYERS = ["embed", *(f"h.{i}.{part}" for i in range(4) for part in ("attn", "mlp.0")), "norm", ""]


def test_layers_are_recomputed_by_their_share_evenly_spread() -> None:
    layers = {share: recomputed(share, _LAYERS).recompute for share in (0, 0.25, 0.5, 0.75, 1, "full")}
    assert layers[0] == ()
    assert layers[0.25] == ("h.3",)
    assert layers[0.5] == ("h.1", "h.3")
    assert layers[0.75] == ("h.1", "h.2", "h.3")
    assert layers[1] == layers["full"] == ("h.0", "h.1", "h.2", "h.3")


@given(share=st.floats(0, 1), more=st.floats(0, 1), count=st.integers(1, 200))
def test_a_share_of_layers_is_rounded_and_more_is_more(share: float, more: float, count: int) -> None:
    modules = [f"h.{i}" for i in range(count)]
    chosen = [int(layer.removeprefix("h.")) for layer in recomputed(share, modules).recompute]
    assert abs(len(chosen) - share * count) <= 0.5
    assert chosen == sorted(set(chosen))
    for i in range(count):  # no stretch has more than one above its share
        assert abs(sum(c < i for c in chosen) - i * len(chosen) / count) < 1
    assert (len(recomputed(more, modules).recompute) >= len(chosen)) or more < share


def test_what_is_not_recomputed_is_left_to_the_partitioner_unless_nothing_is_to_be() -> None:
    assert [recomputed(r, _LAYERS).save_others for r in ("none", "auto", "full", 0, 0.5)] == [True] + [False] * 4
    assert recomputed("none", _LAYERS).recompute == recomputed("auto", _LAYERS).recompute == ()


def test_nothing_is_recomputed_without_a_backward() -> None:
    assert recomputed("full", _LAYERS, training=False).recompute == ()


def test_a_graph_without_layers_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zerograph"):
        recomputed("auto", ["up", "down"])
        recomputed("none", ["up", "down"])
        recomputed("full", _LAYERS)
        assert not caplog.records
        assert recomputed("full", ["up", "down"]).recompute == ()
    (record,) = caplog.records
    assert record.getMessage().startswith("recompute='full': this graph has no repeated layers")


def test_activations_of_all_layers_leave_in_training_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert recomputed("auto", _LAYERS, saved="nvme").offload == tuple((f"h.{i}", "nvme") for i in range(4))
    assert (
        recomputed("auto", _LAYERS).offload == recomputed("auto", _LAYERS, training=False, saved="nvme").offload == ()
    )
    with caplog.at_level(logging.WARNING, "zerograph"):
        assert recomputed("auto", ["up", "down"], saved="nvme").offload == ()
    (record,) = caplog.records
    assert record.getMessage().startswith("activations='nvme': this graph has no repeated layers")
