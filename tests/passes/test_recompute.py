"""What the backward computes again: gathered parameters always, activations as planned."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
import torch._inductor.inductor_prims  # registers the operators for seeds
from expecttest import assert_expected_inline
from graphs import Builder
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.core.plan import Plan
from zerograph.passes import name_activations, recompute

aten, prims = torch.ops.aten, torch.ops.prims

AUTO = Plan(3, 2, (), 1)
NONE = Plan(3, 2, (), 1, save_others=True)
FULL = Plan(3, 2, (), 1, recompute=("h.0", "h.1"))


def _tagged(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]


def test_markers_views_and_casts_are_tagged_and_compute_is_not() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (w,) = b.params("w")
    t = b.call(aten.t.default, w)
    half = b.call(torch.ops.prims.convert_element_type.default, t, torch.float16)
    back = b.call(torch.ops.prims.convert_element_type.default, half, torch.float32)
    product = b.call(aten.mul.Tensor, w, w)
    first = b.call(aten.view.default, b.mm(b.mm(x, back), product), [16])
    gm = b.output(first)
    assert recompute(gm, AUTO) == 4
    assert _tagged(gm) == ["w_full", t.name, half.name, back.name]


def test_a_part_of_a_split_parameter_is_tagged() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (qkv,) = b.params("qkv", shape=(4, 12))
    parts = b.call(aten.split.Tensor, qkv, 4, 1)
    q = b.call(operator.getitem, parts, 0)
    gm = b.output(b.mm(x, q))
    recompute(gm, AUTO)
    assert _tagged(gm) == ["qkv_full", parts.name, q.name]


def test_a_slice_of_dynamic_length_is_tagged() -> None:
    """A position embedding cut to the length of the sequence reads a size besides the parameter."""
    b = Builder()
    b.mode.shape_env = ShapeEnv()
    symbol = b.mode.shape_env.create_unbacked_symint()
    length = b.graph.placeholder("length")
    length.meta["val"] = symbol
    (pos,) = b.params("pos", shape=(64, 4))
    cut = b.graph.call_function(aten.slice.Tensor, (pos, 0, 0, length))
    cut.meta["val"] = pos.meta["val"]
    gm = b.output(b.call(aten.neg.default, cut))
    assert recompute(gm, AUTO) == 2
    assert _tagged(gm) == ["pos_full", cut.name]


def test_without_markers_nothing_is_tagged() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    gm = b.output(b.call(aten.t.default, x))
    assert recompute(gm, AUTO) == 0
    assert _tagged(gm) == []


def _policies(gm: fx.GraphModule) -> str:
    """What is to become of each operator: one line each."""
    policies = {n: n.meta["recompute"].name.lower() if "recompute" in n.meta else "-" for n in gm.graph.nodes}
    return "\n".join(f"{n.name}: {policies[n]}" for n in gm.graph.nodes if n.op == "call_function")


def _two_layers() -> fx.GraphModule:
    """Embedding, two layers with a residual stream (the second behind a view), a head, and a node of the backward."""
    b = Builder()
    x = b.input("x", 4, 4)
    u, v = b.params("u", "v")
    b.module = "L['self'].embed"
    h = b.call(aten.sin.default, x)
    b.module = "L['self'].h.0.mlp"
    h = b.call(aten.view.default, b.call(aten.add.Tensor, h, b.mm(h, u)), [16])
    b.module = "L['self'].h.1.mlp"
    h = b.call(aten.view.default, h, [4, 4])
    up = b.mm(h, b.call(aten.t.default, v))
    b.module = None
    h = b.call(aten.add.Tensor, h, up)
    b.module = "L['self'].head"
    y = b.call(aten.cos.default, h)
    b.module = "L['self'].h.1.mlp"
    grad = b.mm(up, up)
    grad.meta["partitioner_tag"] = "is_backward"
    return b.output(y, grad)


def test_auto_leaves_activations_to_the_partitioner() -> None:
    gm = _two_layers()
    assert recompute(gm, AUTO) == 3
    assert _tagged(gm) == ["u_full", "v_full", "t_default"]


def test_none_saves_every_activation_of_the_forward_but_views() -> None:
    gm = _two_layers()
    recompute(gm, NONE)
    assert_expected_inline(
        _policies(gm),
        """\
u_full: must_recompute
v_full: must_recompute
sin_default: must_save
mm_default: must_save
add_tensor: must_save
view_default: -
view_default_1: -
t_default: must_recompute
mm_default_1: must_save
add_tensor_1: must_save
cos_default: must_save
mm_default_2: -""",
    )


def test_full_recomputes_layers_and_saves_what_passes_between_them() -> None:
    gm = _two_layers()
    recompute(gm, FULL)
    assert_expected_inline(
        _policies(gm),
        """\
u_full: must_recompute
v_full: must_recompute
sin_default: -
mm_default: must_recompute
add_tensor: must_save
view_default: must_recompute
view_default_1: must_recompute
t_default: must_recompute
mm_default_1: must_save
add_tensor_1: -
cos_default: -
mm_default_2: -""",
    )


def test_a_layer_that_is_not_planned_is_left_to_the_partitioner() -> None:
    gm = _two_layers()
    recompute(gm, Plan(3, 2, (), 1, recompute=("h.1",)))
    assert_expected_inline(
        _policies(gm),
        """\
u_full: must_recompute
v_full: must_recompute
sin_default: -
mm_default: -
add_tensor: -
view_default: -
view_default_1: must_recompute
t_default: must_recompute
mm_default_1: must_save
add_tensor_1: -
cos_default: -
mm_default_2: -""",
    )


def test_single_activations_of_a_recomputed_layer_are_saved_by_name(caplog: pytest.LogCaptureFixture) -> None:
    gm = _two_layers()
    name_activations(gm)
    recompute(gm, replace(FULL, save=("h.0.mlp:mm", "h.1.mlp:gone")))
    assert_expected_inline(
        _policies(gm),
        """\
u_full: must_recompute
v_full: must_recompute
sin_default: -
mm_default: must_save
add_tensor: must_save
view_default: must_recompute
view_default_1: must_recompute
t_default: must_recompute
mm_default_1: must_save
add_tensor_1: -
cos_default: -
mm_default_2: -""",
    )
    assert [record.message for record in caplog.records] == [
        "h.1.mlp:gone, which the plan saves, is not in the graph: it is recomputed"
    ]


def test_what_the_user_has_checkpointed_is_not_saved_by_name() -> None:
    b = Builder()
    b.module = "L['self'].h.0"
    node = b.call(aten.sin.default, b.input("x", 4, 4))
    node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 7}
    gm = b.output(b.call(aten.cos.default, node))
    name_activations(gm)
    recompute(gm, replace(FULL, save=("h.0:sin",)))
    assert node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def test_of_a_tuple_that_is_saved_all_parts_are() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    b.module = "L['self'].h.0"
    both = b.call(aten.var_mean.correction, x, [0])
    parts = [b.call(operator.getitem, both, k) for k in range(2)]
    gm = b.output(b.call(aten.mul.Tensor, *parts))
    name_activations(gm)
    recompute(gm, replace(FULL, save=("h.0:var_mean.correction",)))
    assert both.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert not any("recompute" in part.meta for part in parts)


def test_masks_are_drawn_again_from_seeds_that_are_not() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    b.module = "L['self'].h.0"
    seeds = b.call(prims.inductor_seeds.default, 1, torch.device("cpu"))
    seed = b.call(prims.inductor_lookup_seed.default, seeds, 0)
    mask = b.call(prims.inductor_random.default, [4, 4], seed, "rand")
    gm = b.output(b.call(aten.mul.Tensor, x, mask))
    recompute(gm, FULL)
    assert_expected_inline(
        _policies(gm),
        """\
inductor_seeds_default: -
inductor_lookup_seed_default: must_recompute
inductor_random_default: must_recompute
mul_tensor: must_recompute""",
    )


def test_regions_of_the_user_keep_their_tags_and_are_saved_where_a_layer_begins() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    b.module = "L['self'].h.0"
    inner, kept = b.call(aten.sin.default, x), b.call(aten.cos.default, x)
    last = b.mm(inner, kept)
    for node, policy in ((inner, "PREFER_RECOMPUTE"), (kept, "MUST_SAVE"), (last, "MUST_RECOMPUTE")):
        node.meta |= {"recompute": CheckpointPolicy[policy], "ac_graph_id": 7}
    b.module = "L['self'].h.1"
    gm = b.output(b.call(aten.neg.default, b.call(aten.exp.default, last)))
    assert recompute(gm, Plan(3, 2, (), 1, recompute=("h.1",))) == 2
    assert_expected_inline(
        _policies(gm),
        """\
sin_default: prefer_recompute
cos_default: must_save
mm_default: must_save
exp_default: must_recompute
neg_default: must_recompute""",
    )


def test_a_part_of_a_tuple_that_leaves_a_layer_is_saved_with_the_tuple() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    b.module = "L['self'].h.0"
    both = b.call(aten.max.dim, b.call(aten.sin.default, x), 0)
    values, indices = (b.call(operator.getitem, both, i) for i in range(2))
    inside = b.call(aten.neg.default, indices)
    b.module = "L['self'].h.1"
    gm = b.output(b.call(aten.exp.default, values), inside)
    recompute(gm, FULL)
    assert_expected_inline(
        _policies(gm),
        """\
sin_default: must_recompute
max_dim: must_save
getitem: -
getitem_1: -
neg_default: must_recompute
exp_default: must_recompute""",
    )


def test_what_reads_an_input_that_is_overwritten_is_saved_under_every_plan() -> None:
    for plan in (AUTO, NONE, FULL):
        b = Builder()
        x, count = b.input("x", 4), b.input("count", 4)
        b.module = "L['self'].h.0"
        more = b.call(aten.add.Tensor, b.call(aten.view.default, count, [4]), 1)
        y = b.call(aten.mul.Tensor, x, more)
        b.call(aten.copy_.default, count, more)
        recompute(b.output(y), plan)
        assert more.meta["recompute"] is CheckpointPolicy.MUST_SAVE
