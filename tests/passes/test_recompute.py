"""Gathered parameters, and what is cheap to make of them, are never saved for the backward."""

from __future__ import annotations

import operator

import torch
from graphs import Builder
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.passes import recompute

aten = torch.ops.aten


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
    assert recompute(gm) == 4
    assert _tagged(gm) == ["w_full", t.name, half.name, back.name]


def test_a_part_of_a_split_parameter_is_tagged() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    (qkv,) = b.params("qkv", shape=(4, 12))
    parts = b.call(aten.split.Tensor, qkv, 4, 1)
    q = b.call(operator.getitem, parts, 0)
    gm = b.output(b.mm(x, q))
    recompute(gm)
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
    assert recompute(gm) == 2
    assert _tagged(gm) == ["pos_full", cut.name]


def test_without_markers_nothing_is_tagged() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    gm = b.output(b.call(aten.t.default, x))
    assert recompute(gm) == 0
    assert _tagged(gm) == []
