"""Of every trainable parameter the backward reduces the gradient."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from graphs import Builder, plan, show

from zerograph.core.errors import InvariantError
from zerograph.passes import gather, reduce, verify_reduced


def test_golden_graph() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    u, v = b.params("u", "v")
    h = b.mm(b.mm(x, u), v)
    gm = b.output(b.reduce_grad(b.mm(h, h), u), b.reduce_grad(b.mm(h, x), v))
    p = plan(gm, "u v")
    for rewrite in (gather, reduce):
        rewrite(gm, p)
    before = show(gm)
    assert verify_reduced(gm, p) == 2
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([u_shard, v_shard], 0)
wait_gather_default = wait_gather(gather_default, [u_shard, v_shard], 0)
getitem = getitem(wait_gather_default, 0)
getitem_1 = getitem(wait_gather_default, 1)
mm_default = mm(x, getitem)
mm_default_1 = mm(mm_default, getitem_1)
mm_default_2 = mm(mm_default_1, mm_default_1)
mm_default_3 = mm(mm_default_1, x)
free_default = free([getitem, getitem_1], 0)
reduce_default = reduce([mm_default_2, mm_default_3], 0)
wait_reduce_default = wait_reduce(reduce_default, [mm_default_2, mm_default_3], 0)
getitem_2 = getitem(wait_reduce_default, 0)
getitem_3 = getitem(wait_reduce_default, 1)
return [getitem_2, getitem_3]""",
    )
    assert show(gm) == before


def test_a_gradient_is_not_reduced() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    u, v = b.params("u", "v")
    h = b.mm(b.mm(x, u), v)
    given = b.output(b.reduce_grad(b.mm(h, h), u), b.reduce_grad(b.mm(h, x), v))
    p = plan(given, "u v")
    other = Builder()
    (u,) = other.params("u")
    with pytest.raises(InvariantError, match="the gradient of u is not reduced"):
        verify_reduced(other.output(u), p)


def test_one_rank_reduces_nothing() -> None:
    b = Builder()
    (u,) = b.params("u")
    gm = b.output(b.reduce_grad(b.mm(u, u), u))
    p = plan(gm, "u", world_size=1)
    other = Builder()
    (u,) = other.params("u")
    assert verify_reduced(other.output(u), p) == 0
