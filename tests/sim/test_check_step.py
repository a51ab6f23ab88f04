"""What must be true of a step's programs by its plan, found wherever coarse programs break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from planner.steps import Layer, step_of
from planner.test_offload import CPU, GPU, MIB, placed, ruled, scheduler_of

from zerograph.core.instructions import (
    Compute,
    DeviceUpdate,
    Free,
    Gather,
    HostUpdate,
    Instruction,
    Move,
    Reduce,
    Update,
    WaitFetch,
    WaitGather,
)
from zerograph.core.machine import Machine
from zerograph.core.plan import Placement, Plan
from zerograph.core.program import Program
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.search.constraints import PLACEMENTS
from zerograph.sim.check import CHECKS, check_programs

STEP = step_of([Layer(rows=MIB, stream=MIB)] * 2)
FAR = placed(ruled(STEP), PLACEMENTS[-1], tiles=2)
HERE = ruled(STEP)
SAVED = replace(HERE, offload=(("blocks.0", "nvme"), ("blocks.1", "nvme")), save_others=True)
PASSING = replace(placed(HERE, Placement("host", "host", "host")), update="device")


def programs_of(plan: Plan, machine: Machine = GPU) -> tuple[Program, ...]:
    programs = coarse_programs(scheduler_of(STEP, plan, machine), plan)
    assert check_programs(programs, plan) == []
    return programs


ON_HOST, ON_DEVICE = ("update", "states", HostUpdate), ("update", "states", DeviceUpdate)
Change = Callable[[Any], Sequence[Instruction]]


def changed(programs: Sequence[Program], wanted: Callable[[Any], bool], change: Change) -> list[Program]:
    """The first instruction that is ``wanted``, changed in every program."""
    first = next(each for program in programs for each in program.instructions if wanted(each))
    return [
        replace(p, instructions=[new for each in p.instructions for new in (change(each) if each is first else [each])])
        for p in programs
    ]


def unread(operation: str, what: str, kind: type = Move) -> tuple[Callable[[Any], bool], Change]:
    """An instruction of that operation and kind that reads nothing."""
    return (
        lambda each: isinstance(each, kind) and each.operation == operation and getattr(each, "what", "") == what,  # type: ignore[attr-defined]
        lambda each: [replace(each, reads=())],
    )


def found(programs: Sequence[Program], plan: Plan, check: str) -> list[str]:
    assert check in CHECKS
    return [wrong.message for wrong in check_programs(programs, plan) if wrong.check == check]


@pytest.mark.parametrize(
    ("plan", "broken", "message"),
    [
        (FAR, ("gather", "", Gather), "gather blocks.0 tile 1/2 does not read what the fetch of its shard wrote"),
        (FAR, ("fetch", "shard"), "fetch shard of blocks.0 tile 1/2 does not read what the read of its shard wrote"),
        (
            FAR,
            ("read", "states"),
            "states of blocks.1 tile 1/2 does not read what the write of its gradient wrote",
        ),
        (
            FAR,
            ON_HOST,
            "update blocks.1 tile 1/2 does not read what the read of its states wrote",
        ),
        (
            FAR,
            ("write", "states"),
            "states of blocks.1 tile 1/2 does not read what the update of its states wrote",
        ),
        (
            placed(HERE, Placement("host", "host", "host")),
            ON_HOST,
            "the spill of its gradient wrote",
        ),
        (
            placed(HERE, Placement("device", "device", "nvme")),
            ON_HOST,
            "the spill of its gradient wrote",
        ),
        (
            placed(HERE, Placement("device", "device", "nvme")),
            ("fetch", "parameters"),
            "the update of its states wrote",
        ),
        (PASSING, ("fetch", "states"), "fetch states of blocks.1 does not read what the spill of its gradient wrote"),
        (
            PASSING,
            ON_DEVICE,
            "update blocks.1 does not read what the fetch of its states wrote",
        ),
        (PASSING, ("spill", "states"), "spill states of blocks.1 does not read what the update of its states wrote"),
        (SAVED, ("fetch", "activations"), "does not read what the read of its activations wrote"),
        (SAVED, ("read", "activations"), "does not read what the write of its activations wrote"),
        (
            replace(SAVED, offload=(("blocks.0", "host"),)),
            ("fetch", "activations"),
            "the spill of its activations wrote",
        ),
    ],
)
def test_what_does_not_read_what_came_is_found(plan: Plan, broken: tuple[Any, ...], message: str) -> None:
    texts = found(changed(programs_of(plan), *unread(*broken)), plan, "arrivals")
    assert any(message in text for text in texts), texts


def test_on_a_cpu_what_is_read_needs_no_fetch() -> None:
    plan = placed(HERE, Placement("nvme", "nvme", "nvme"))
    programs = programs_of(plan, CPU)
    gather = found(changed(programs, *unread("gather", "", Gather)), plan, "arrivals")
    assert gather[0].startswith("gather blocks.0 does not read what the fetch of its shard wrote")
    assert "read of its states" in found(changed(programs, *unread(*ON_HOST)), plan, "arrivals")[0]


def test_an_update_with_the_gradient_of_another_tile_is_found() -> None:
    programs = programs_of(FAR)
    updates = [each for each in programs[-1].instructions if isinstance(each, HostUpdate)]
    other = changed(programs, lambda each: each is updates[0], lambda each: [replace(each, reads=updates[1].reads)])
    assert found(other, FAR, "arrivals")[0].startswith("update blocks.1 tile 1/2 does not read")


@pytest.mark.parametrize(("plan", "kind"), [(FAR, WaitGather), (SAVED, WaitFetch)])
def test_what_nothing_waits_for_is_found(plan: Plan, kind: type) -> None:
    lost = changed(programs_of(plan), lambda each: isinstance(each, kind), lambda each: [])
    texts = found(lost, plan, "use")
    assert texts and all(text.endswith("is waited for by nothing") for text in texts)
    assert texts[0].startswith(("gather blocks.0", "fetch activations of blocks.0"))


def test_a_bucket_that_is_never_gathered_is_found() -> None:
    programs = programs_of(HERE)
    left = [
        replace(p, instructions=[each for each in p.instructions if not isinstance(each, Gather | WaitGather | Free)])
        for p in programs
    ]
    assert found(left, HERE, "use") == [f"{bucket.name} is sharded and never gathered" for bucket in HERE.buckets]


def test_more_tiles_at_a_time_than_are_gathered_ahead_are_found() -> None:
    plan = placed(HERE, Placement(), tiles=4)
    texts = found(programs_of(plan), replace(plan, prefetch=0), "tiles ahead")
    assert texts and all(text.endswith("makes 2 tiles whole at a time, 1 may be") for text in texts)


@pytest.mark.parametrize(
    ("plan", "kind", "times", "check", "message"),
    [
        (FAR, Reduce, 0, "reductions", "gradients of blocks.1 tile 1/2 are reduced 0 times, not 1"),
        (FAR, Reduce, 2, "reductions", "gradients of blocks.1 tile 1/2 are reduced 2 times, not 1"),
        (FAR, HostUpdate, 0, "updates", "blocks.1 tile 1/2 is updated on the host 0 times, not 1"),
        (FAR, HostUpdate, 2, "updates", "blocks.1 tile 1/2 is updated on the host 2 times, not 1"),
        (HERE, Update, 0, "updates", "blocks.0 is updated on the device 0 times, not 1"),
        (HERE, Update, 2, "updates", "blocks.1 is updated on the device 2 times, not 1"),
    ],
)
def test_what_happens_not_once_is_found(plan: Plan, kind: type, times: int, check: str, message: str) -> None:
    often = changed(programs_of(plan), lambda each: isinstance(each, kind), lambda each: [each] * times)
    assert message in found(often, plan, check)


def test_what_the_plan_knows_nothing_of_is_found() -> None:
    one = replace(HERE, buckets=HERE.buckets[:1])
    assert "gradients of bucket 1 are reduced 1 times, not 0" in found(programs_of(HERE), one, "reductions")
    frozen = [replace(p, trainable=False) for p in HERE.buckets[0].params]
    still = replace(HERE, buckets=(replace(HERE.buckets[0], params=tuple(frozen)), *HERE.buckets[1:]))
    assert "gradients of blocks.0 are reduced 1 times, not 0" in found(programs_of(HERE), still, "reductions")
    assert "blocks.0 is updated on the device 1 times, not 0" in found(programs_of(HERE), still, "updates")
    far = replace(FAR, buckets=FAR.buckets[:1])
    assert "bucket 1 is updated on the host 1 times, not 0" in found(programs_of(FAR), far, "updates")


@pytest.mark.parametrize(
    "change",
    [
        {"recompute": ("blocks.77",)},
        {"recompute": ("blocks.77",), "save": ("blocks.77.mlp:mm",)},
        {"offload": (("blocks.77", "host"),)},
    ],
)
def test_decisions_about_layers_that_are_not_there_are_found(change: dict[str, Any]) -> None:
    texts = found(programs_of(HERE), replace(HERE, **change), "layers")
    assert texts and all("blocks.77" in text for text in texts)


def test_other_tiles_of_tokens_than_the_plan_says_are_found() -> None:
    layer = "blocks.1"
    tiled = replace(HERE, recompute=(layer,), token_tiles=3, token_regions=(f"{layer}.mlp:mm",))

    def of(module: str, tiles: int) -> list[Program]:
        return [
            replace(
                p,
                instructions=[
                    replace(each, token_tiles=tiles) if isinstance(each, Compute) and each.module == module else each
                    for each in p.instructions
                ],
            )
            for p in programs_of(HERE)
        ]

    assert found(of(layer, 3), tiled, "tokens") == []
    assert found(of(layer, 3), HERE, "tokens") == [
        f"{phase} {layer} runs in 3 tiles of tokens, the plan has 1" for phase in ("forward", "backward")
    ]
    lost = "{} is in {} tiles of tokens, and nothing makes one"
    assert found(of(layer, 1), tiled, "tokens") == [lost.format(f"{layer}.mlp:mm", 3)]
    loss = replace(HERE, loss_tiles=4, head="head:mm")
    assert found(of("", 4), loss, "tokens") == []
    assert lost.format("head:mm", 8) in found(of("", 4), replace(loss, loss_tiles=8), "tokens")
    assert lost.format("head:mm", 4) in found(of("", 1), loss, "tokens")


def test_tiles_of_tokens_reduce_all_tiles_of_a_weight_as_often() -> None:
    tiled = placed(ruled(STEP), Placement(), tiles=2)
    by_token = replace(tiled, recompute=("blocks.1",), token_tiles=2, token_regions=("blocks.1.mlp:mm",))
    twice = [
        replace(p, instructions=[each for each in p.instructions for _ in range(1 + isinstance(each, Reduce))])
        for p in programs_of(tiled)
    ]
    assert found(twice, by_token, "reductions") == []
    assert "gradients of blocks.1 tile 1/2 are reduced 2 times, not 1" in found(twice, tiled, "reductions")
    lacking = changed(twice, lambda each: isinstance(each, Reduce) and each.tile == 1, lambda each: [])
    assert found(lacking, by_token, "reductions") == ["gradients of blocks.1 tile 2/2 are reduced 0 times, not 2"]
