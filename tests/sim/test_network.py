"""Collectives between CPU hosts occupy one network beside compute, and cores for their part inside of a host.

Tests ``sim/simulate.py`` where hosts are several.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerograph.core.files.runfile import Measured
from zerograph.core.instructions import Compute, Gather, Instruction, Reduce, WaitGather, WaitReduce
from zerograph.core.machine import Link, Machine, machine_named
from zerograph.core.program import Program, Register, Segment
from zerograph.core.timeline import Forecast
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate

# A byte takes a second; of four, two cross the network between two hosts, and two come from the other rank of the host.
HOSTS = replace(machine_named("cpu"), ranks_per_node=2, intra=Link(2.0), inter=Link(1.0), launch=0.0)
COMPUTES = 1.5
BYTES = 4
SEGMENT = Segment("", 1, moved=int(COMPUTES * HOSTS.device_bandwidth))


def played(
    *instructions: Instruction, machine: Machine = HOSTS, world: int = 4, replicas: int = 1,
    measured: Measured | None = None,
) -> Forecast:  # fmt: skip
    contents = [Register(f"register {i}", 1, i, "gathered") for i in range(8)]
    program = Program("backward", 0, 8, instructions, (), [SEGMENT], contents, carries=True)
    return simulate([program], Rates(machine, world, "float32", replicas), measured=measured)[0]


def times(forecast: Forecast) -> list[tuple[str, float, float]]:
    return [(span.stream, span.start, pytest.approx(span.end)) for span in forecast.spans]


def gather(bucket: int) -> Gather:
    return Gather(bucket, (), (), bucket, bytes=BYTES)


def reduce(bucket: int) -> Reduce:
    return Reduce(bucket, (), (bucket,), bucket + 4, bytes=BYTES)


COMPUTE = Compute(0, (), ())


def waited(bucket: int) -> WaitGather:
    return WaitGather(bucket, (bucket,), bucket=bucket)


def test_the_network_carries_a_gather_beside_compute_and_cores_what_is_left() -> None:
    found = times(played(gather(0), COMPUTE, waited(0), COMPUTE))
    assert found == [("gather", 0, 2), ("compute", 0, 1.5), ("compute", 2, 2 + 1 + 1.5)]


def test_a_reduction_begins_with_the_cores_of_its_host() -> None:
    found = times(played(COMPUTE, reduce(0), COMPUTE, WaitReduce(4, bucket=0), COMPUTE))
    assert found == [("compute", 0, 1.5), ("reduce", 1.5, 4.5), ("compute", 1.5, 4), ("compute", 4.5, 6)]


def test_gathers_and_reductions_take_turns_on_the_network() -> None:
    found = played(reduce(0), gather(1), COMPUTE, waited(1), WaitReduce(4, bucket=0), COMPUTE)
    assert times(found) == [("reduce", 0, 3), ("gather", 3, 5), ("compute", 0, 2.5), ("compute", 5, 7.5)]
    assert found.exposed_communication == pytest.approx(2.5)


def test_inside_of_one_host_and_on_gpus_all_is_as_it_was() -> None:
    step = (reduce(0), gather(1), COMPUTE, waited(1), COMPUTE)
    (_, _, reduced), (_, begin, gathered), (_, first, _), _ = times(played(*step, world=2))
    assert (reduced, begin, gathered, first) == (1, 0, 1, 1), "the next compute comes after both"
    gpu = replace(HOSTS, device="cuda")
    assert [start for _, start, _ in times(played(*step, machine=gpu))][:3] == [0, 0, 0], "two streams beside compute"


def test_between_unequal_hosts_all_is_the_networks() -> None:
    found = times(played(gather(0), COMPUTE, waited(0), COMPUTE, world=3))
    assert found == [
        ("gather", 0, BYTES * 2 / 3),
        ("compute", 0, 1.5),
        ("compute", 0 + BYTES * 2 / 3, BYTES * 2 / 3 + 1.5),
    ]


def test_averages_over_replicas_cross_it() -> None:
    average = replace(reduce(0), averaged=BYTES // 2)
    found = times(played(average, COMPUTE, gather(1), waited(1), COMPUTE, world=2, replicas=2))
    # A second inside of the host, and twice the half of what its two ranks hold between hosts.
    assert found[0] == ("reduce", 0, 1 + 2 * BYTES / 2)
    assert found[1:3] == [("compute", 0, 2.5), ("gather", 2.5, 2.5)], "a gather stays in the host, on its cores"
    assert found[3] == ("compute", 2.5, 2.5 + 1 + 1.5)


def test_what_a_run_measured_kept_compute_from_running() -> None:
    step = (gather(0), COMPUTE, waited(0), COMPUTE)
    found = times(played(*step, measured=Measured(gathers={0: 0.5})))
    assert found == [("gather", 0, 0.5), ("compute", 0.5, 2), ("compute", 2, 3.5)]


def test_a_buffer_is_memory_from_the_compute_that_waits_for_it() -> None:
    found = played(gather(0), COMPUTE, gather(1), waited(0), COMPUTE, waited(1), COMPUTE)
    computing = [span.start for span in found.spans if span.stream == "compute"]
    levels = [[size for time, size in found.memory["device"] if time <= start][-1] for start in computing]
    assert [later - levels[0] for later in levels] == [0, 1, 2]
