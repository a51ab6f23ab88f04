"""Operators with effects have a token each, and none stands between inputs."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.compiler.lowering.lower import keep_together
from zerograph.graph.torch_private import MAKE_TOKEN, SINK_TOKENS, WITH_EFFECTS
from zerograph.passes import gather, prefetch, separate_effects, verify

CHECK = torch.ops.aten._linalg_check_errors.default


def _two_checks() -> fx.GraphModule:
    """What AOTAutograd gives the compiler: it puts a token in the place of the first input."""
    b = Builder()
    token = b.call(MAKE_TOKEN)
    a, c = b.params("a", "c")
    product, info = b.mm(a, c), b.input("info", dtype=torch.int32)
    for _ in range(2):
        node = b.graph.call_function(WITH_EFFECTS, (token, CHECK, info, "solve"), {"is_matrix": True})
        node.meta["val"] = (token.meta["val"], None)
        token = b.call(operator.getitem, node, 0)
    b.graph.call_function(SINK_TOKENS, ([token],)).meta["val"] = None
    return b.output(product)


def test_golden_graph() -> None:
    gm = _two_checks()
    p = plan(gm, "a c")
    assert separate_effects(gm, p) == 2
    gather(gm, p)
    prefetch(gm, p)  # to the graph's first operator: a token, of which some inputs stood behind
    gm.graph.lint()
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([a_shard, c_shard], 0)
wait_gather_default = wait_gather(gather_default, [a_shard, c_shard], 0)
getitem_4 = getitem(wait_gather_default, 0)
getitem_5 = getitem(wait_gather_default, 1)
mm_default = mm(getitem_4, getitem_5)
_make_token_default_2 = _make_token()
with_effects = with_effects(_make_token_default_2, aten._linalg_check_errors.default, info, solve, True)
getitem_3 = getitem(with_effects, 0)
_sink_tokens_default_2 = _sink_tokens([getitem_3])
_make_token_default_1 = _make_token()
with_effects_1 = with_effects(_make_token_default_1, aten._linalg_check_errors.default, info, solve, True)
getitem_2 = getitem(with_effects_1, 0)
_sink_tokens_default_1 = _sink_tokens([getitem_2])
free_default = free([getitem_4, getitem_5], 0)
return [mm_default]""",
    )


def test_a_gather_comes_not_between_a_token_and_who_takes_it() -> None:
    b = Builder()
    token = b.call(MAKE_TOKEN)
    (a,) = b.params("a")
    node = b.graph.call_function(WITH_EFFECTS, (token, CHECK, a, "print"), {"is_matrix": True})
    node.meta["val"] = (token.meta["val"], None)
    gm = b.output(b.call(torch.ops.aten.relu.default, a))
    p = plan(gm, "a")
    separate_effects(gm, p)
    gather(gm, p)
    (made,) = gm.graph.find_nodes(op="call_function", target=MAKE_TOKEN)
    assert made.next.target is not WITH_EFFECTS
    keep_together(gm.graph)
    assert made.next.target is WITH_EFFECTS


def test_graphs_without_effects_stay() -> None:
    b = Builder()
    (a,) = b.params("a")
    gm = b.output(b.mm(a, a))
    before = show(gm)
    assert separate_effects(gm, plan(gm, "a")) == 0
    assert show(gm) == before
