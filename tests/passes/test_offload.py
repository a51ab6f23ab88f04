"""What layers save leaves behind its last reader, and is back before the first reader of the backward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, show
from torch import fx

from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.graph import layers
from zerograph.graph.nodes import Pair, SavedFact
from zerograph.graph.ops import FETCH_SAVED, SPILL_SAVED, WAIT_FETCH_SAVED
from zerograph.passes import name_activations, offload

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _short_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_LEAST", 1)


def planned(*offloaded: tuple[str, Tier], ahead: int = 1) -> Plan:
    return replace(Plan(0, 1, (), 0), offload=offloaded, fetch_ahead=ahead)


def pair(*, returned: bool = False) -> Pair:
    """Two layers, of which the first saves a tensor and a view of it, and a head; the model may return the first."""
    b = Builder()
    x = b.input("x", 4)
    b.module = "blocks.0"
    first = b.call(aten.exp.default, x, name="first")
    view = b.call(aten.view.default, first, [2, 2], name="view")
    b.module = "blocks.1"
    second = b.call(aten.sin.default, first, name="second")
    product = b.call(aten.mul.Tensor, second, second, name="product")
    b.module = "head"
    negative = b.call(aten.neg.default, product, name="negative")
    users = (negative, first) if returned else (negative,)
    forward = b.output(*users, first, view, second)
    name_activations(forward)

    b = Builder()
    saved, looked, kept = b.input("first", 4), b.input("view", 2, 2), b.input("second", 4)
    tangent = b.input("tangent", 4)
    b.module = "head"
    gradient = b.call(aten.neg.default, tangent)
    b.module = "blocks.1"
    gradient = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, gradient, kept), b.call(aten.cos.default, saved))
    b.module = "blocks.0"
    flat = b.call(aten.view.default, looked, [4])
    return Pair(forward, b.output(b.call(aten.mul.Tensor, gradient, flat)), len(users))


def test_golden_graphs_of_a_layer_and_an_activation() -> None:
    both = pair()
    assert offload(both, planned(("blocks.0", "nvme"), ("blocks.1:sin", "host"))) == 3
    assert_expected_inline(
        show(both.forward),
        """\
first = exp(x)
view = view(first, [2, 2])
second = sin(first)
product = mul(second, second)
spill_saved_default = spill_saved([first, view])
getitem = getitem(spill_saved_default, 0)
getitem_1 = getitem(spill_saved_default, 1)
spill_saved_default_1 = spill_saved([second])
getitem_2 = getitem(spill_saved_default_1, 0)
negative = neg(product)
return [negative, getitem, getitem_1, getitem_2]""",
    )
    assert_expected_inline(
        show(both.backward),
        """\
fetch_saved_default = fetch_saved([first, view])
fetch_saved_default_1 = fetch_saved([second])
neg_default = neg(tangent)
wait_fetch_saved_default = wait_fetch_saved(fetch_saved_default, [first, view])
getitem = getitem(wait_fetch_saved_default, 0)
getitem_1 = getitem(wait_fetch_saved_default, 1)
wait_fetch_saved_default_1 = wait_fetch_saved(fetch_saved_default_1, [second])
getitem_2 = getitem(wait_fetch_saved_default_1, 0)
mul_tensor = mul(neg_default, getitem_2)
cos_default = cos(getitem)
mul_tensor_1 = mul(mul_tensor, cos_default)
view_default = view(getitem_1, [4])
mul_tensor_2 = mul(mul_tensor_1, view_default)
return [mul_tensor_2]""",
    )
    (spilled, other) = both.forward.graph.find_nodes(op="call_function", target=SPILL_SAVED, sort=True)
    assert spilled.meta["zg"] == SavedFact("blocks.0", "nvme", (16, 0), (0, 0))
    assert other.meta["zg"] == SavedFact("blocks.1:sin", "host", (16,), (0,))


def _at(gm: fx.GraphModule, target: object) -> Iterator[int]:
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not torch.ops.aten.view.default]
    return (i for i, node in enumerate(nodes) if node.target is target)


def test_more_layers_ahead_begin_earlier_and_are_waited_for_in_the_same_place() -> None:
    far = [pair() for _ in range(3)]
    for ahead, both in enumerate(far, start=1):
        offload(both, planned(("blocks.0", "nvme"), ("blocks.1", "nvme"), ahead=ahead))
    fetches = [list(_at(both.backward, FETCH_SAVED)) for both in far]
    waits = [list(_at(both.backward, WAIT_FETCH_SAVED)) for both in far]
    assert len(fetches[0]) == 2 and fetches[0][0] == fetches[1][0] == 0
    assert fetches[2] == [0, 1]  # everything at once, at the very start
    assert waits[0] == waits[1] == waits[2]


def test_what_the_model_returns_stays_with_all_that_looks_at_it() -> None:
    both = pair(returned=True)
    assert offload(both, planned(("blocks.0", "nvme"))) == 0
    assert not both.forward.graph.find_nodes(op="call_function", target=SPILL_SAVED)


def test_nothing_is_changed_where_nothing_leaves() -> None:
    both = pair()
    before = show(both.forward), show(both.backward)
    assert offload(both, planned()) == 0
    assert (show(both.forward), show(both.backward)) == before


def test_a_named_activation_that_is_gone_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    both = pair()
    with caplog.at_level(logging.WARNING):
        assert (
            offload(both, planned(("blocks.1:tanh", "nvme"), ("blocks.0:relu", "nvme"), ("blocks.1:sin", "nvme"))) == 1
        )
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "blocks.0:relu, blocks.1:tanh, which the plan moves off the device, is not in"
    )
