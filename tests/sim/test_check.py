"""What must be true of programs: true of all coarse programs of a plan, and found wherever it is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from planner.steps import Layer, step_of
from planner.test_offload import GPU, MIB, Drawn, placed, plans, ruled, scheduler_of
from quick import examples

from zerograph.core.errors import InvariantError
from zerograph.core.instructions import Compute, Free, Gather, Instruction, Move, Reduce, WaitGather
from zerograph.core.program import Program
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.search.constraints import PLACEMENTS
from zerograph.sim.check import check_programs, require_programs


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_nothing_is_wrong_with_the_coarse_programs_of_a_plan(found: Drawn) -> None:
    step, plan, machine, moments = found
    assert check_programs(coarse_programs(scheduler_of(step, plan, machine, moments), plan), plan) == []


STEP = step_of([Layer(rows=MIB)] * 2)
PLAN = placed(ruled(STEP), PLACEMENTS[-1], tiles=2)
PROGRAMS = coarse_programs(scheduler_of(STEP, PLAN, GPU), PLAN)


def without(kind: type, number: int = 0) -> list[Program]:
    """The coarse programs without their ``number``-th instruction of that kind."""
    found = [step for program in PROGRAMS for step in program.instructions if isinstance(step, kind)]
    return changed(found[number], ())


def changed(old: Instruction, new: tuple[Instruction, ...]) -> list[Program]:
    """The coarse programs with other instructions in place of one."""
    return [
        replace(p, instructions=[kept for step in p.instructions for kept in (new if step is old else (step,))])
        for p in PROGRAMS
    ]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (without(Gather), "is waited for, and has not begun"),
        (without(Free), "begins while it is whole"),
        (without(Compute), "lets go of register"),
        (without(Move, 1), "which is not there"),
    ],
)
def test_what_is_missing_is_noticed(programs: list[Program], message: str) -> None:
    found = [str(wrong) for wrong in check_programs(programs, PLAN)]
    assert any(message in text for text in found), found


def test_a_gradient_is_reduced_once() -> None:
    reduce = next(step for program in PROGRAMS for step in program.instructions if isinstance(step, Reduce))
    found = [str(wrong) for wrong in check_programs(changed(reduce, (reduce, reduce)), PLAN)]
    assert any("are reduced 2 times, not 1" in text for text in found), found


def test_what_is_read_lies_where_it_is_needed() -> None:
    contents = [replace(r, tier="host") if r.kind == "gathered" else r for r in PROGRAMS[0].contents]
    found = [str(wrong) for wrong in check_programs([replace(p, contents=contents) for p in PROGRAMS])]
    assert any("on host, and needs it on device" in text for text in found)


def test_what_is_free_is_not_read() -> None:
    first = PROGRAMS[0].instructions
    gather = next(step for step in first if isinstance(step, Gather))
    wait = next(step for step in first if isinstance(step, WaitGather))
    free = Free(gather.bucket, (gather.out,), (gather.out,), tile=gather.tile, tiles=gather.tiles)
    found = [str(wrong) for wrong in check_programs(changed(wait, (free, wait)), PLAN)]
    assert any("which is free" in text for text in found), found


def test_a_bucket_is_resident_from_its_wait_to_its_free() -> None:
    free = next(step for program in PROGRAMS for step in program.instructions if isinstance(step, Free))
    found = [str(wrong) for wrong in check_programs(changed(free, (replace(free, resident=True),)), PLAN)]
    assert any("is kept by one instruction and let go of by another" in text for text in found), found


def test_programs_that_cannot_run_are_refused_with_the_first_reasons() -> None:
    with pytest.raises(InvariantError, match=r"and [0-9]+ more\n\nhint: report it") as caught:
        require_programs([replace(PROGRAMS[0], instructions=PROGRAMS[0].instructions[5:])], "report it")
    assert str(caught.value).startswith("these programs cannot run:\n  forward instruction ")
