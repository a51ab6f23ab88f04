"""Programs survive JSON, and what is no program is refused.

Tests ``core/files/columns.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from planner.test_offload import Drawn, plans, scheduler_of
from quick import examples

from zerograph.core.files.columns import from_mixed_table, mixed_table
from zerograph.core.files.programs_data import programs_data, programs_of
from zerograph.core.instructions import Compute, Free, Gather, Place, View, WaitGather
from zerograph.core.layout import Layout
from zerograph.core.plan import Param, tile_params
from zerograph.core.program import Program, Register, Segment
from zerograph.core.segment_profile import SegmentProfile
from zerograph.planner.programs.coarse import coarse_programs, snapshot


@settings(max_examples=examples(20), deadline=None)
@given(plans())
def test_coarse_programs_read_back_equal_themselves(found: Drawn) -> None:
    step, plan, machine, moments = found
    programs = snapshot(coarse_programs(scheduler_of(step, plan, machine, moments), plan))
    assert again(programs) == programs


WEIGHT = Param("weight", (8, 4), "float32", "bfloat16", "float32", True, Layout("rows", 2), ("head.weight",))
PARAMS = (WEIGHT, tile_params(WEIGHT, 2)[1])
CONTENTS = tuple(Register(f"r{at}", 8, at, "temporary") for at in range(4))
FORWARD = Program(
    "forward", 1, 4,
    (
        Gather(0, PARAMS, (0,), 1), WaitGather(1, (2,), (1,), bucket=0),
        Compute(0, (2,), (3,), module="m", source="m.py:1"),
        View(3, 1, 0, 2, 4), Place((1,), 1, True, shape=(-1, 4)), Free(0, (2,), (2,), resident=True),
    ),
    (3, None), (Segment("d", 2, 5, memory=SegmentProfile((4, 6), (0, 1), 2, {0: 1, 3: 0})),), CONTENTS, ("bucket",),
)  # fmt: skip
UPDATE = Program(
    "update", 0, 5, (), (), FORWARD.segments, (*CONTENTS, Register("s", 0, 4, "state", "host")), carries=True
)


def again(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    return programs_of(json.loads(json.dumps(programs_data(programs))))


def test_parameters_segments_and_what_is_carried_are_there_again() -> None:
    found = again((FORWARD, UPDATE))
    assert found == (FORWARD, UPDATE)
    gather = found[0].instructions[0]
    assert isinstance(gather, Gather) and [type(p) for p in gather.params] == [type(p) for p in PARAMS]
    assert found[0].digest == FORWARD.digest
    assert programs_data((FORWARD, UPDATE))["programs"][1]["contents"]["name"] == ["s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["instructions"]["Gather"].update(out=[4]), "forward instruction 0 names a register"),
        (lambda p: p["instructions"]["Gather"].update(bucket=[9]), "forward instruction 0 names bucket 9"),
        (lambda p: p["instructions"]["Compute"].update(segment=[1]), "forward instruction 2 names segment 1"),
        (lambda p: p["instructions"]["Compute"].update(reads=[["a"]]), "reads of Compute holds 'a'"),
        (lambda p: p["instructions"]["Gather"].update(bytes=["8GiB"]), "bytes of Gather holds '8GiB'"),
        (lambda p: p["contents"].update(bytes=[8, 8, None, 8]), "bytes of Register holds None"),
    ],
)
def test_what_was_changed_to_nonsense_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    data = json.loads(json.dumps(programs_data((FORWARD,))))
    change(data["programs"][0])
    with pytest.raises(ValueError, match=message):
        programs_of(data)


def test_classes_that_nobody_expects_are_refused() -> None:
    with pytest.raises(KeyError, match="Register"):
        from_mixed_table((Segment,), mixed_table(CONTENTS))
