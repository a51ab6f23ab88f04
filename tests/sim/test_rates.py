"""Seconds of instructions: what ZeRO counts of collectives (Rajbhandari et al. 2019, section 7).

Tests ``core/param_bytes.py`` too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerograph.core.instructions import Accumulate, Compute, Gather, Move, Reduce
from zerograph.core.layout import Layout
from zerograph.core.machine import Link, Tier, machine_named
from zerograph.core.param_bytes import gathered_bytes, reduced_bytes, sizes_of_states
from zerograph.core.program import Segment
from zerograph.core.step import Param
from zerograph.sim.rates import Rates

WORLD = 8
GPU = machine_named("h100-80gb")
FREE = replace(GPU, intra=replace(GPU.intra, latency=0.0), intra_step=0.0, inter_step=0.0)
RATES = Rates(FREE, WORLD, "float32")
WEIGHT = Param("weight", (1024, 1024), "float32", "float32", "float32", True, Layout("rows", WORLD))
PASS = WEIGHT.gathered_bytes * (WORLD - 1) / WORLD / FREE.intra.rate
"""Seconds in which every rank sends or receives the others' parts of the whole tensor."""


def reduction(*params: Param) -> float:
    return RATES.seconds(Reduce(0, params, (), 0, bytes=reduced_bytes(params)), ())


def test_a_gather_and_a_reduce_scatter_take_a_pass_each() -> None:
    gather = Gather(0, (WEIGHT,), (), 0, bytes=gathered_bytes((WEIGHT,)))
    assert RATES.seconds(gather, ()) == pytest.approx(PASS)
    assert reduction(WEIGHT) == pytest.approx(PASS)


def test_an_all_reduce_takes_as_long_as_both() -> None:
    unsharded = replace(WEIGHT, home=Layout("whole", WORLD))
    assert reduction(unsharded) == pytest.approx(2 * PASS)
    assert reduction(WEIGHT, unsharded) == pytest.approx(3 * PASS)


def test_shards_are_summed_over_their_replicas_too() -> None:
    far = Link(rate=FREE.intra.rate / 4)
    rates = replace(RATES, machine=replace(FREE, inter=far, ranks_per_node=WORLD), replicas=4)
    part = WEIGHT.gathered_bytes // WORLD
    reduce = Reduce(0, (WEIGHT,), (), 0, bytes=reduced_bytes((WEIGHT,)), averaged=part)
    # All-reduces of the parts of a host's 8 ranks among 4 hosts: twice 3/4 of the whole, over the slower link.
    assert rates.seconds(reduce, ()) == pytest.approx(PASS + 2 * 8 * part * 3 / 4 / far.rate)
    near = replace(rates, machine=replace(FREE, ranks_per_node=4 * WORLD))
    assert near.seconds(reduce, ()) == pytest.approx(PASS + 2 * part * 3 / 4 / FREE.intra.rate), "a link for each rank"
    gather = Gather(0, (WEIGHT,), (), 0, bytes=gathered_bytes((WEIGHT,)))
    assert rates.seconds(gather, ()) == pytest.approx(PASS), "within a replica"


def test_hosts_of_cpus_send_each_part_once() -> None:
    hosts = replace(machine_named("cpu"), ranks_per_node=2, intra=Link(8e9), inter=Link(1e9))
    size = WEIGHT.gathered_bytes
    two_levels, uneven = (Rates(hosts, world, "float32").collective(size) for world in (6, 5))
    # Of three hosts each gets what two others have, and then a rank what the other one of its host got.
    assert two_levels == pytest.approx(size * 2 / 3 / 1e9 + size / 2 / 8e9)
    assert uneven == pytest.approx(size * 4 / 5 / 1e9)


def test_nothing_is_gathered_of_what_every_rank_holds_as_kernels_read_it() -> None:
    unsharded = replace(WEIGHT, home=Layout("whole", WORLD))
    assert gathered_bytes((unsharded,)) == 0
    assert gathered_bytes((replace(unsharded, compute_dtype="bfloat16"), WEIGHT)) == (2 + 4) * WEIGHT.elements


def test_sizes_of_states_are_of_what_trains() -> None:
    frozen = replace(WEIGHT, name="frozen", trainable=False)
    assert sizes_of_states([WEIGHT, frozen], 2) == {"weight": 2 * 4 * WEIGHT.elements // WORLD}


def test_states_that_an_update_reads_and_writes_share_the_disk() -> None:
    machine = replace(machine_named("cpu"), nvme_read=Link(4e9), nvme_write=Link(2e9), nvme_both=3e9, ranks_per_node=1)
    rates = Rates(machine, 1, "float32")

    def moving(source: Tier, target: Tier, what: str) -> Move:
        return Move(source, target, what, "", "", 12 * 10**9, (), ())

    def seconds(source: Tier, target: Tier, what: str) -> float:
        return rates.seconds(moving(source, target, what), ())

    assert (seconds("nvme", "host", "shard"), seconds("host", "nvme", "gradient")) == (3, 6)
    assert (seconds("nvme", "host", "states"), seconds("host", "nvme", "states")) == (8, 8)
    unmeasured = Rates(replace(machine, nvme_both=0.0), 1, "float32")
    assert unmeasured.seconds(moving("nvme", "host", "states"), ()) == 3


def test_a_cpu_copies_what_it_multiplies_into_blocks() -> None:
    """Of few rows that takes a product as long as its operations do (RESULTS)."""
    cpu = Rates(replace(machine_named("cpu"), launch=0.0, device_bandwidth=1e9), 1, "float32")
    weight, work = 4 * 10**9, 10**9
    alone, packed = Segment("", 1, work, weight), Segment("", 1, work, weight, packed=weight)
    compute, product = Compute(0, (), ()), Accumulate((), 0, False, flops=work, moved=weight, packed=weight)
    more = 2 * weight / 1e9
    assert cpu.seconds(compute, [packed]) == pytest.approx(cpu.seconds(compute, [alone]) + more)
    assert cpu.seconds(product, []) == pytest.approx(cpu.seconds(compute, [packed]))
    assert RATES.seconds(compute, [packed]) == RATES.seconds(compute, [alone])


def test_fused_attention_has_a_rate_of_its_own() -> None:
    """Of a machine that was measured; a preset computes it as products."""
    measured = Rates(replace(machine_named("cpu"), attention={"bfloat16": 1e9}), 1, "bfloat16")
    work = 4 * 10**9
    product, attention = Segment("", 1, work), Segment("", 1, 2 * work, attention=work)
    compute = Compute(0, (), ())
    assert measured.seconds(compute, [attention]) == pytest.approx(measured.seconds(compute, [product]) + work / 1e9)
    preset = Rates(machine_named("cpu"), 1, "bfloat16")
    assert preset.seconds(compute, [attention]) == preset.seconds(compute, [replace(product, flops=2 * work)])
    in_float32 = replace(measured, dtype="float32")
    assert in_float32.seconds(compute, [attention]) == preset.seconds(compute, [attention])
