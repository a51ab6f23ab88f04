"""Instructions say what they read, write and move; a program says what ranks must agree on, and reads well.

Tests ``core/instructions.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from zerograph.core.instructions import (
    Accumulate,
    BeginUpdate,
    Collective,
    Compute,
    DeviceUpdate,
    Free,
    Gather,
    HostUpdate,
    Instruction,
    Move,
    Place,
    Reduce,
    Scale,
    Timed,
    Update,
    View,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.layout import Layout
from zerograph.core.machine import LINKS, TIERS, Tier
from zerograph.core.plan import Residency
from zerograph.core.program import Program, Segment, stays_resident
from zerograph.core.step import Param
from zerograph.core.timeline import STREAMS

W = Param("w", (4,), "float32", "float32", "float32", True, Layout("rows", 2))
V = Param("v", (2,), "float32", "bfloat16", "float32", True, Layout("whole", 2))


def moving(source: Tier, target: Tier, what: str = "shard") -> Move:
    return Move(source, target, what, "blocks.0 tile 1/2", "blocks.0", 2**20, (1,), (2,))


UPDATES = tuple(kind("blocks.0 tile 1/2", "blocks.0", 2**20, (1,), (2,)) for kind in (HostUpdate, DeviceUpdate))


FORWARD = (
    Gather(0, (W,), (0,), 2, dead=(0,)),
    WaitGather(2, (3,), dead=(2,), bucket=0),
    Compute(0, (1, 3), (4,), dead=(1,), module="blocks.0.mlp"),
    Free(0, (3,), dead=(3,)),
)
EACH: tuple[Instruction, ...] = (
    *FORWARD, Reduce(0, (W, V), (1, 2), 3), WaitReduce(3, (4, 5), bucket=0), Update((0,), (64,), reads=(4, 5)),
    *(moving(*link) for link in LINKS), *UPDATES, WaitFetch(2), BeginUpdate(0),
    View(0, 2, 0, 1, 3), Place((2,), 3, True, shape=(4, 2)), Accumulate((1, 2), 3, False),
    Scale(1, 2, 3),
)  # fmt: skip


def program(*instructions: Instruction, kind: str = "forward", buckets: tuple[str, ...] = ()) -> Program:
    return Program(kind, 2, 6, instructions, (4, None), (Segment("0" * 16, 1),), buckets=buckets)


def test_there_is_one_of_each_kind_here() -> None:
    assert {type(step) for step in EACH} == set(get_args(Instruction))


@pytest.mark.parametrize("step", EACH, ids=lambda step: type(step).__name__)
def test_an_instruction_describes_itself(step: Instruction) -> None:
    """What the simulation, the check and the viewers ask of every one; a wait has no stream, all that takes time do."""
    assert isinstance(step.reads, tuple) and isinstance(step.writes, tuple) and step.dead == tuple(step.dead)
    assert (step.stream in STREAMS) is isinstance(step, Timed)
    assert isinstance(step, Timed) or step.stream is None
    made = program(step, buckets=("blocks.0",))
    assert made.name(step) and isinstance(made.label(step), str) and isinstance(made.module(step), str)
    assert len(str(made).splitlines()) == 1


def test_moves_are_between_two_neighbouring_tiers() -> None:
    moves = {move.operation: move for move in (moving(*link) for link in LINKS)}
    rises = {"fetch": True, "spill": False, "read": True, "write": False}
    assert {name: move.rises for name, move in moves.items()} == rises
    assert all(abs(TIERS.index(source) - TIERS.index(target)) == 1 for source, target in LINKS)
    assert len({move.stream for move in moves.values()}) == len(LINKS)
    staged = [replace(move, offload_tier=tier).staged for tier in ("host", "nvme") for move in moves.values()]
    assert staged == [False] * 4 + [True, True, False, False]


def test_what_is_read_and_written() -> None:
    gather, wait, compute, free, reduce, wait_reduce, update = EACH[:7]
    assert [(step.reads, step.writes) for step in (gather, wait, compute, free)] == [
        ((0,), (2,)),
        ((2,), (3,)),
        ((1, 3), (4,)),
        ((3,), ()),
    ]
    view, place, accumulate, scale = EACH[-4:]
    assert [(step.reads, step.writes) for step in (view, place, accumulate, scale)] == [
        ((0,), (2,)),
        ((2,), (3,)),
        ((1, 2, 3), (3,)),
        ((1, 2), (3,)),
    ]
    assert [(step.reads, step.writes) for step in (reduce, wait_reduce, update)] == [
        ((1, 2), (3,)),
        ((3,), (4, 5)),
        ((4, 5), ()),
    ]


@pytest.mark.parametrize(
    ("residency", "expected"),
    [("use", ()), ("backward", ("forward",)), ("step", ("forward", "backward"))],
)
def test_a_bucket_stays_resident_for_training_only(residency: Residency, expected: tuple[str, ...]) -> None:
    assert tuple(k for k in ("forward", "backward", "inference") if stays_resident(residency, k)) == expected


def test_a_program_tells_what_it_works_for_and_what_it_reads() -> None:
    forward = program(*FORWARD)
    assert forward.names == {W.name} and forward.unread == ()
    assert replace(forward, inputs=6).unread == (5,)
    assert replace(forward, inputs=6, outputs=(4, 5)).unread == ()
    assert not forward.trims  # it is no backward
    backward = program(*FORWARD, kind="backward")
    assert not backward.trims and program(replace(FORWARD[0], resident=True), kind="backward").trims


def test_the_text_is_one_line_per_instruction() -> None:
    lines = str(program(*FORWARD)).splitlines()
    assert [line.split()[1] for line in lines] == ["Gather", "WaitGather", "Compute", "Free"]
    assert lines[0] == "   0  Gather       bucket 0"
    assert str(program(moving("device", "host", "gradient"))) == "   0  Move         blocks.0 tile 1/2"


def test_collectives_name_what_all_ranks_must_agree_on() -> None:
    both = program(Gather(0, (W, V), (0, 1), 2), Reduce(0, (W, V), (2, 3), 4))
    assert list(both.collectives()) == [
        "gather bucket 0: w [4] float32",
        "gather bucket 0: v [2] bfloat16 whole",
        "reduce bucket 0: w [4] float32",
        "reduce bucket 0: v [2] float32 whole",
    ]
    assert [step for step in EACH if isinstance(step, Collective)] == [EACH[0], EACH[4]]


def test_the_digest_is_that_of_the_collectives_only() -> None:
    expected = program(*FORWARD)
    assert expected.digest == replace(expected, instructions=FORWARD[:2], registers=9, outputs=()).digest
    assert expected.digest != program(Gather(0, (V,), (0,), 2)).digest
    assert expected.digest != program(*FORWARD, kind="backward").digest
    both = Gather(0, (W,), (0,), 2), Reduce(0, (W,), (2,), 3)
    assert program(*both).digest != program(*reversed(both)).digest


def test_people_read_the_names_of_buckets_layers_and_tiles() -> None:
    tile = Gather(1, (W,), (0,), 2, tile=1, tiles=4)
    named, bare = program(tile, buckets=("embed", "head")), program(tile)
    assert (named.name(tile), named.module(tile)) == ("gather head tile 2/4", "head")
    assert (bare.name(tile), bare.module(tile)) == ("gather bucket 1 tile 2/4", "")
    compute, outside = FORWARD[2], Compute(0, (1,), (2,))
    assert named.name(compute) == "forward blocks.0" and named.module(compute) == "blocks.0.mlp"
    assert named.name(outside) == "forward outside of layers"
    fetch = moving("host", "device")
    assert (named.name(fetch), named.label(fetch)) == ("fetch shard of blocks.0 tile 1/2", "blocks.0 tile 1/2")
    assert named.name(Update((0,), (8,))) == "optimizer update"
    assert named.label(WaitFetch(2)) == named.module(WaitFetch(2)) == ""
