"""Machines as files: what no machine is like is refused before anything is computed with it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zerograph.core.errors import ConfigError
from zerograph.core.machine import (
    DISKS,
    LINKS,
    PRESETS,
    TIERS,
    Machine,
    hops,
    machine_named,
    memory_name,
    offload_tier,
    preset_for,
    published_rates,
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_read_back(name: str) -> None:
    assert Machine.from_json(PRESETS[name].to_json()) == PRESETS[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_memory": "80GiB"}, "device_memory is '80GiB'"),
        ({"device_memory": -5}, "device_memory is -5"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"intra": {"rate": 0, "latency": 0}}, "rate of intra is 0"),
        ({"h2d": {"rate": 1e9, "latency": -1}}, "latency of h2d is -1"),
        ({"inter_step": -1}, "inter_step is -1, not a number of at least 0"),
        ({"matmul": {"float32": 1e12}}, "matmul has not one rate for each of"),
        ({"device_bandwidth": None}, "device_bandwidth is None"),
        ({"published": {"float32": 0}}, "published rate of float32 is 0"),
        ({"published": "much"}, "published is 'much'"),
        ({"attention": {"bfloat16": -1}}, "attention of bfloat16 is -1"),
        ({"attention": 3e12}, "attention is 3000000000000.0, not rates by dtype"),
        ({"disturbed": 2}, "disturbed is 2"),
        ({"context": -1}, "context is -1, not a whole number of at least 0"),
        ({"communicator": "4MiB"}, "communicator is '4MiB', not a whole number of at least 0"),
    ],
    ids=str,
)
def test_what_no_machine_is_like_is_refused(change: dict[str, Any], message: str) -> None:
    data = json.loads(PRESETS["h100-80gb"].to_json()) | change
    with pytest.raises(ConfigError, match=message):
        Machine.from_json(json.dumps(data))


def test_a_budget_leaves_what_is_outside_of_the_allocator() -> None:
    """At least: what is reserved is for that, too. A CPU has nothing of the kind, nor a device whose free bytes are
    given."""
    h100, cpu = PRESETS["h100-80gb"], PRESETS["cpu"]
    assert h100.outside(1) == {"driver's context": h100.context}
    assert h100.outside(8) == {"driver's context": h100.context, "NCCL's buffers": 2 * h100.communicator}
    beside = sum(h100.outside(8).values())
    assert 0.5 * 2**30 < beside < 0.06 * h100.device_memory
    assert h100.budget(8)["device"] == h100.device_memory - beside
    assert h100.budget(8, 0.06)["device"] == int(0.94 * h100.device_memory)
    assert not cpu.outside(8) and cpu.budget(8)["device"] == cpu.device_memory
    given = machine_named("h100-80gb", 2**20)
    assert not given.outside(8) and given.budget(8)["device"] == 2**20


def test_machines_of_older_files_have_nothing_outside() -> None:
    data = json.loads(PRESETS["h100-80gb"].to_json())
    del data["context"], data["communicator"]
    assert not Machine.from_json(json.dumps(data)).outside(8)


def test_float32_products_are_tf32_only_where_torch_is_set_so() -> None:
    a100 = PRESETS["a100-80gb"]
    assert a100.published["float32"] == 19.5e12
    high = a100.with_precision("high")
    assert high.published["float32"] == 156e12
    assert high.matmul["float32"] == a100.matmul["tf32"] == pytest.approx(8 * a100.matmul["float32"])
    assert (high.matmul["bfloat16"], high.published["bfloat16"]) == (a100.matmul["bfloat16"], 312e12)
    assert a100.with_precision("highest") is a100


def test_where_no_rate_of_tf32_is_published_the_measured_one_stands_and_other_dtypes_keep_theirs() -> None:
    a100 = PRESETS["a100-80gb"]
    own = replace(a100, published={"float32": 19.5e12, "bfloat16": 312e12})
    high = own.with_precision("high")
    assert high.peak_rate("bfloat16") == (312e12, "published")
    assert high.peak_rate("float32") == (a100.matmul["tf32"], "measured")
    assert own.peak_rate("float32") == (19.5e12, "published")


def test_a_device_without_tf32_computes_float32_the_same_way() -> None:
    for name in ("v100-32gb-dgx2", "cpu"):
        assert PRESETS[name].with_precision("high") is PRESETS[name]


def test_what_the_vendor_publishes_goes_by_the_name_of_the_device() -> None:
    assert published_rates("NVIDIA H100 80GB HBM3") == PRESETS["h100-80gb"].published
    assert published_rates("Radeon") == {}  # its rates are nobody's guess, though a plan needs some machine
    assert preset_for("cuda", "Radeon") == PRESETS["h100-80gb"]


def test_a_disturbed_machine_says_so() -> None:
    assert replace(PRESETS["cpu"], disturbed=0.38).title == "cpu (measured while others took 38% of it)"
    assert PRESETS["cpu"].title == "cpu"


def test_bytes_pass_the_host_between_device_and_disk() -> None:
    assert all(hops(*link, staging) == (link,) for link in LINKS for staging in ("host", "device"))
    assert hops("nvme", "device", "host") == (("nvme", "host"), ("host", "device"))
    assert hops("device", "nvme", "host") == (("device", "host"), ("host", "nvme"))
    # On a CPU the host's memory is the device's.
    assert hops("nvme", "device", "device") == (("nvme", "host"),)
    assert hops("device", "nvme", "device") == (("host", "nvme"),)


def test_a_disk_is_slower_while_it_is_read_and_written() -> None:
    machine = replace(PRESETS["cpu"], nvme_both=1e9)
    assert machine.link("nvme", "host") == machine.nvme_read
    assert machine.link("nvme", "host", both=True) == replace(machine.nvme_read, rate=5e8)
    assert machine.link("host", "device", both=True) == machine.h2d


def test_names_of_tiers() -> None:
    assert [memory_name(tier) for tier in TIERS] == ["device memory", "host memory", "NVMe"]
    assert [offload_tier(choice) for choice in ("auto", "keep", "recompute", None)] == ["device"] * 4
    assert all(offload_tier(tier) == tier for tier in TIERS) and set(TIERS) >= DISKS


def test_a_ring_takes_longer_the_more_ranks_and_nodes_it_has() -> None:
    """NCCL's own model: 8.4 us, 3.4 for each further rank of a node, 14 for each further node."""
    machine = PRESETS["h100-80gb"]
    found = {ranks: machine.collective(ranks) for ranks in (1, 8, 16, 512)}
    assert [found[ranks].latency * 1e6 for ranks in found] == pytest.approx(
        [8.4, 8.4 + 7 * 3.4, 8.4 + 14 * 3.4 + 14, 8.4 + 448 * 3.4 + 63 * 14]
    )
    assert [found[ranks].rate for ranks in found] == [machine.intra.rate] * 2 + [machine.inter.rate] * 2
    # Replicas: one rank of each of 64 nodes, or every fourth of one node.
    assert machine.collective(64, stride=8).latency * 1e6 == pytest.approx(8.4 + 63 * 14)
    assert machine.collective(2, stride=4).latency * 1e6 == pytest.approx(8.4 + 3.4)


def test_a_machine_from_before_rings_has_no_steps() -> None:
    data = json.loads(PRESETS["a100-80gb"].to_json())
    del data["intra_step"], data["inter_step"]
    found = Machine.from_json(json.dumps(data))
    assert found.collective(512) == found.inter


def test_hosts_of_cpus_are_full_and_told() -> None:
    cpu = machine_named("cpu")
    found = {world: (cpu.hosts(world), cpu.per_host(world), cpu.describe_hosts(world)) for world in (1, 2, 5, 6)}
    assert found == {
        1: (1, None, ""),
        2: (1, None, ""),
        5: (1, None, "3 hosts of up to 2 ranks, which communicate in one level"),
        6: (3, 2, "3 hosts of 2 ranks, which communicate in two levels"),
    }
    assert cpu.describe_hosts(2, replicas=3) == "3 hosts of 2 ranks"
    assert replace(cpu, ranks_per_node=1).describe_hosts(2) == "2 hosts of 1 rank"
    gpus = machine_named("a100-80gb")
    assert (gpus.hosts(16), gpus.per_host(16), gpus.describe_hosts(16)) == (1, None, "")
