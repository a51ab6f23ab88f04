"""What a process is said to grow by: messages as the mailbox counts them, and every part of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run

from zerograph.core.instructions import Compute, Free, Gather, Instruction, Reduce, WaitGather, WaitReduce
from zerograph.core.layout import Layout
from zerograph.core.program import Program, Segment
from zerograph.core.step import Param
from zerograph.planner.programs.process_memory import FRAGMENTATION, PER_OPERATOR, process_growth, transport_bytes
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm.shared_memory import open_shared_memory

WIDE = Param("wide", (1024, 1024), "float32", "float32", "float32", trainable=True, home=Layout("rows", 2))
ODD = Param("odd", (4099, 3), "float32", "bfloat16", "float32", trainable=True, home=Layout("rows", 2))
UNSHARDED = Param("unsharded", (100_001,), "float32", "bfloat16", "float32", trainable=True, home=Layout("whole", 2))
EXACT = replace(ODD, name="exact", reduce_dtype="float64")
CONTROL = 266240
COMPUTE = Compute(0, (), ())
BLOCK = 2**21 + 2**18
"""Half of ``wide`` and a header, in steps of an eighth."""


def program(kind: str, *steps: Instruction, segments: Sequence[Segment] = ()) -> Program:
    return Program(kind, 0, 0, steps, (), tuple(segments))


def gather(bucket: int, out: int) -> Gather:
    return Gather(bucket, (WIDE,), (), out)


def rows(param: Param, rank: int) -> torch.Tensor:
    return torch.ones(param.shard_shape(rank), dtype=torch_dtype(param.dtype))


def _block(params: tuple[Param, ...], reduces: bool) -> int:
    """Bytes of a fresh mailbox's blocks once one collective over ``params`` has ended."""
    assert dist.group.WORLD is not None
    transport = open_shared_memory(dist.group.WORLD)
    assert transport is not None
    before = transport.mailbox.bytes
    assert before == CONTROL
    if reduces:
        grads = [torch.ones(p.shape, dtype=torch_dtype(p.compute_dtype)) for p in params]
        transport.finish_reduce(transport.start_reduce(params, grads))
    else:
        transport.finish_gather(transport.start_gather(params, [rows(p, dist.get_rank()) for p in params]))
    return int(transport.mailbox.bytes) - before


@pytest.mark.parametrize(
    ("params", "reduces"),
    [((WIDE,), False), ((WIDE, ODD), False), ((ODD,), True), ((EXACT, WIDE), True), ((ODD, UNSHARDED), True)],
)
def test_a_message_takes_what_the_mailbox_takes(params: tuple[Param, ...], reduces: bool) -> None:
    """Twice: nothing says that peers have read the first step's message when the second one's is posted."""
    steps = (
        (Reduce(0, params, (), 0), WaitReduce(0, (), bucket=0))
        if reduces
        else (Gather(0, params, (), 0), WaitGather(0, (), bucket=0))
    )
    block = (transport_bytes([program("forward", *steps)], 2) // 2 - CONTROL) // 2
    assert run(2, _block, params, reduces) == [block, block]


def test_a_block_is_used_again_once_peers_have_gone_on() -> None:
    """Peers may not have read what this rank has just read; once it has computed, they have."""
    at_once = [step for i in range(8) for step in (gather(i, i), WaitGather(i, (), bucket=i))]
    ahead = [*(gather(i, i) for i in range(3)), *(WaitGather(i, (), bucket=i) for i in range(3)), COMPUTE]
    in_turn = [step for i in range(8) for step in (gather(i, i), WaitGather(i, (), bucket=i), COMPUTE)]
    for steps, blocks in ((at_once, 16), (ahead, 3), (in_turn, 1)):
        assert transport_bytes([program("forward", *steps)], 2) == 2 * (blocks * BLOCK + CONTROL)
    assert transport_bytes([program("forward", *ahead)], 1) == 0


def test_what_is_resident_is_not_gathered_again() -> None:
    """Stage 1: the backward's gathers, two at a time here, find what the forward left."""
    for resident, blocks in ((True, 1), (False, 2)):
        forward = program(
            "forward",
            *(gather(0, 0), WaitGather(0, (), bucket=0), COMPUTE, Free(0, (), resident=resident)),
            *(gather(1, 1), WaitGather(1, (), bucket=1), COMPUTE, Free(1, (), resident=resident)),
        )
        waits = (WaitGather(0, (), bucket=0), WaitGather(1, (), bucket=1))
        backward = program("backward", gather(0, 0), gather(1, 1), *waits, COMPUTE, Free(0, ()), Free(1, ()))
        assert transport_bytes([forward, backward], 2) == 2 * (blocks * BLOCK + CONTROL), resident


def test_all_parts_are_in_the_sum() -> None:
    """Operators count as often as their segment runs: each was traced."""
    few = program("forward", COMPUTE, segments=[Segment("a", operators=7)])
    many = replace(few, instructions=few.instructions * 3)
    one, three = (process_growth([p], 1000 * 2**20, 2) for p in (few, many))
    assert three.compilers - one.compilers == 14 * PER_OPERATOR > 0
    assert three.bytes == three.peak + three.transport + three.compilers + three.allocator
    assert three.allocator == int(FRAGMENTATION * three.peak) > 0
    assert "the process grows by about" in str(three)
