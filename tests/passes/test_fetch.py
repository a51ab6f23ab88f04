"""Shards that live off the device are fetched where their gather would have begun, which then follows at its use."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline
from graphs import Builder, plan, show

from zerograph.core.plan import Placement, Plan
from zerograph.graph.ops import FETCH, GATHER, WAIT_FETCH, WAIT_GATHER
from zerograph.passes import fetch, gather, prefetch, verify

NVME = Placement("nvme", "nvme", "nvme")


def offloaded(found: Plan, *buckets: int) -> Plan:
    """``found`` with parameters of ``buckets`` on NVMe."""
    return replace(found, buckets=tuple(replace(b, placement=NVME) if b.index in buckets else b for b in found.buckets))


def test_the_fetch_begins_ahead_and_the_gather_follows_at_the_use() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    u, v = b.params("u", "v")
    gm = b.output(b.mm(b.mm(x, u), v))
    p = offloaded(plan(gm, "u", "v", prefetch=1), 1)
    gather(gm, p)
    prefetch(gm, p)
    assert fetch(gm, p) == 1
    verify(gm, p)
    assert_expected_inline(
        show(gm),
        """\
gather_default = gather([u_shard], 0)
fetch_default = fetch([v_shard], 1)
wait_gather_default = wait_gather(gather_default, [u_shard], 0)
getitem = getitem(wait_gather_default, 0)
mm_default = mm(x, getitem)
free_default = free([getitem], 0)
wait_fetch_default = wait_fetch(fetch_default, [v_shard], 1)
getitem_2 = getitem(wait_fetch_default, 0)
gather_default_1 = gather([getitem_2], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [v_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
mm_default_1 = mm(mm_default, getitem_1)
free_default_1 = free([getitem_1], 1)
return [mm_default_1]""",
    )


def test_every_gather_of_a_bucket_has_its_fetch() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    names = [f"w{i}" for i in range(5)]
    params = b.params(*names)
    for param in (*params, params[0]):
        x = b.mm(x, param)
    gm = b.output(x)
    p = offloaded(plan(gm, *names, prefetch=2), *range(5))
    gather(gm, p)
    prefetch(gm, p)
    gathers = len(gm.graph.find_nodes(op="call_function", target=GATHER))
    assert fetch(gm, p) == gathers
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.find_nodes(op="call_function", target=FETCH):
        (wait,) = node.users
        assert wait.target is WAIT_FETCH
        (here,) = wait.users
        (gathered,) = here.users
        assert gathered.target is GATHER and gathered.next.target is WAIT_GATHER
        assert order[node] <= order[wait] < order[gathered]


def test_what_stays_on_the_device_is_not_fetched() -> None:
    b = Builder()
    gm = b.output(b.mm(b.input("x", 4, 4), *b.params("u")))
    p = plan(gm, "u")
    gather(gm, p)
    assert fetch(gm, p) == 0
