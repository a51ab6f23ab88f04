"""What backends carry out, written once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerograph.core.executable import missing, tiers_run
from zerograph.core.layout import Layout
from zerograph.core.machine import machine_named
from zerograph.core.plan import Bucket, Param, Placement, Plan

PARAM = Param("a.weight", (64, 4), "float32", "float32", "float32", True, Layout("rows", 2))
PLAN = Plan(3, 2, (Bucket(0, "a", (PARAM,), "use"),), 1)


@pytest.mark.parametrize(
    ("plan", "cpu", "cuda"),
    [
        (PLAN, "", ""),
        (
            replace(PLAN, buckets=(replace(PLAN.buckets[0], placement=Placement(optimizer="nvme")),)),
            "",
            "",
        ),
        (
            replace(PLAN, buckets=(replace(PLAN.buckets[0], placement=Placement("host", "host", "nvme"), tiles=2),)),
            "parameters and gradients on host, optimizer on nvme (bucket a)",
            "",
        ),
        (
            replace(PLAN, offload=(("blocks.0", "nvme"),), loss_tiles=3),
            "head and loss in 3 tiles, of logits without a name",
            "head and loss in 3 tiles, of logits without a name",
        ),
        (
            replace(PLAN, offload=(("blocks.0", "host"), ("blocks.1", "nvme"))),
            "activations of blocks.0 on host",
            "",
        ),
    ],
)
def test_what_is_missing(plan: Plan, cpu: str, cuda: str) -> None:
    assert missing(plan, tiers_run(machine_named("cpu"))) == cpu
    assert missing(plan, tiers_run(machine_named("h100-80gb"))) == cuda


def test_where_something_may_go_on_a_split_machine() -> None:
    split = replace(machine_named("cpu"), split=True)
    assert tiers_run(split) == ("host", "nvme") and tiers_run(split, disks=()) == ("host",)
    beyond = replace(PLAN, buckets=(replace(PLAN.buckets[0], placement=Placement("host", "host", "nvme")),))
    assert missing(beyond, tiers_run(split)) == ""
    assert missing(beyond, tiers_run(split, disks=())) == (
        "parameters and gradients on host, optimizer on nvme (bucket a)"
    )


def test_activations_go_where_shards_may() -> None:
    split = replace(machine_named("cpu"), split=True)
    both = replace(PLAN, offload=(("blocks.0", "host"), ("blocks.1", "nvme")))
    assert missing(both, tiers_run(split)) == ""
    assert missing(both, tiers_run(split, disks=())) == "activations of blocks.1 on nvme"
