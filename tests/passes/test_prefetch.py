"""Gathers start ahead of their interval, and never too many at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, run, show
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.ops import FREE, GATHER, WAIT_GATHER
from zerograph.passes import gather, prefetch, verify

aten = torch.ops.aten


def _chain(*uses: str, ahead: int) -> tuple[fx.GraphModule, Plan]:
    """A chain of products that reads parameters in the order of ``uses``, one bucket each."""
    b = Builder(world_size=1)
    x = b.input("x", 4, 4)
    names = list(dict.fromkeys("".join(uses)))
    markers = dict(zip(names, b.params(*names), strict=True))
    for use in uses:
        if len(use) == 1:
            x = b.mm(x, b.call(aten.t.default, markers[use]) if len(x.users) % 2 else markers[use])
        else:
            x = b.call(aten.addcmul.default, x, b.call(aten.t.default, markers[use[0]]), markers[use[1]])
    gm = b.output(x)
    return gm, plan(gm, *names, prefetch=ahead, world_size=1)


def _moves(gm: fx.GraphModule) -> str:
    """The order of gathers (g), waits (w), frees (f) and compute (-), with the number of the bucket."""
    letters = {GATHER: "g", WAIT_GATHER: "w", FREE: "f"}
    calls = [n for n in gm.graph.nodes if n.target in letters or n.target is aten.mm.default]
    return " ".join(f"{letters[n.target]}{n.args[-1]}" if n.target in letters else "-" for n in calls)


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (0, "g0 w0 - f0 g1 w1 - f1 g2 w2 - f2 g3 w3 - f3"),
        (1, "g0 g1 w0 - f0 g2 w1 - f1 g3 w2 - f2 w3 - f3"),
        (2, "g0 g1 g2 w0 - f0 g3 w1 - f1 w2 - f2 w3 - f3"),
    ],
)
def test_gathers_start_that_many_visits_ahead(ahead: int, order: str) -> None:
    gm, p = _chain("a", "b", "c", "d", ahead=ahead)
    gather(gm, p)
    prefetch(gm, p)
    verify(gm, p)
    assert _moves(gm) == order


@pytest.mark.parametrize(
    ("each", "order"),
    [
        ((None, 0, None, None), "g0 g2 w0 - f0 g1 g3 w1 - f1 w2 - f2 w3 - f3"),
        ((2, 1, 0, 0), "g0 g1 w0 - f0 w1 - f1 g2 w2 - f2 g3 w3 - f3"),
        ((0, 2, 2, 1), "g0 g1 g2 w0 - f0 w1 - f1 g3 w2 - f2 w3 - f3"),
    ],
)
def test_a_bucket_may_be_gathered_later_than_others(each: tuple[int | None, ...], order: str) -> None:
    gm, p = _chain("a", "b", "c", "d", ahead=2)
    (expected,), _ = run(gm)
    p = replace(p, buckets=tuple(replace(b, ahead=ahead) for b, ahead in zip(p.buckets, each, strict=True)))
    gather(gm, p)
    prefetch(gm, p)
    verify(gm, p)
    assert _moves(gm) == order
    assert torch.equal(run(gm)[0][0], expected)


def test_golden_graph() -> None:
    gm, p = _chain("a", "b", ahead=1)
    gather(gm, p)
    assert prefetch(gm, p) == 1
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([a_shard], 0)
gather_default_1 = gather([b_shard], 1)
wait_gather_default = wait_gather(gather_default, [a_shard], 0)
getitem = getitem(wait_gather_default, 0)
mm_default = mm(x, getitem)
free_default = free([getitem], 0)
wait_gather_default_1 = wait_gather(gather_default_1, [b_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_1 = mm(mm_default, getitem_1)
free_default_1 = free([getitem_1], 1)
return [mm_default_1]""",
    )


def test_the_first_gathers_travel_while_computes_without_parameters_run() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    u, v = b.params("u", "v")
    gm = b.output(b.mm(b.mm(b.mm(x, x), u), v))
    p = plan(gm, "u", "v")
    gather(gm, p)
    assert prefetch(gm, p) == 2
    verify(gm, p)
    assert _moves(gm) == "g0 g1 - w0 - f0 w1 - f1"


def test_a_bucket_that_stays_resident_takes_the_place_of_one_ahead() -> None:
    gm, p = _chain("a", "b", "a", "c", "d", ahead=1)
    gather(gm, p)
    prefetch(gm, p)
    verify(gm, p)
    assert _moves(gm) == "g0 g1 w0 - w1 - - f0 f1 g2 g3 w2 - f2 w3 - f3"


def test_a_bucket_is_not_gathered_again_before_its_free() -> None:
    """Buckets p and q stay whole around a's interval, so a's second gather must not move into its first."""
    gm, p = _chain("p", "q", "a", "p", "q", "r", "s", "a", ahead=3)
    gather(gm, p)
    prefetch(gm, p)
    verify(gm, p)
    assert _moves(gm).count("g2") == 2


def test_without_gathers_nothing_happens() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    gm = b.output(b.mm(x, x))
    before = show(gm)
    assert prefetch(gm, plan(gm)) == 0
    assert show(gm) == before


_LETTERS = "abcdef"
_USES = st.lists(st.sampled_from([*_LETTERS, "ab", "bc", "cd", "fa"]), min_size=1, max_size=16)


@settings(max_examples=examples(60), deadline=None)
@given(uses=_USES, ahead=st.integers(0, 4), each=st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_any_order_of_uses_keeps_the_invariants_and_the_result(uses: list[str], ahead: int, each: list[int]) -> None:
    gm, p = _chain(*uses, ahead=ahead)
    p = replace(p, buckets=tuple(replace(b, ahead=min(ahead, each[b.index])) for b in p.buckets))
    (expected,), _ = run(gm)
    gather(gm, p)
    prefetch(gm, p)
    verify(gm, p)
    (found,), peak = run(gm)
    assert torch.equal(expected, found)
    assert peak <= max(ahead + 1, *map(len, uses))
