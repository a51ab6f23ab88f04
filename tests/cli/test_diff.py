"""`zerograph diff`: what differs, collapsed, and the exit code.

Tests ``cli/view/differences.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_file

from zerograph.cli import main
from zerograph.cli.view.differences import Difference, differences
from zerograph.core.files.planfile import PlanFile
from zerograph.core.plan import Bucket, Plan

FILE = plan_file(6)


def with_plan(**changes: object) -> PlanFile:
    return replace(FILE, plan=replace(FILE.plan, **changes))


def with_buckets(**changes: object) -> PlanFile:
    """All buckets but the first changed alike."""
    first, *others = FILE.plan.buckets
    return with_plan(buckets=(first, *(replace(bucket, **changes) for bucket in others)))


def run(folder: Path, a: PlanFile, b: PlanFile, *args: str) -> Result:
    for name, file in (("a.json", a), ("b.json", b)):
        (folder / name).write_text(file.to_json())
    return CliRunner().invoke(main, ["diff", str(folder / "a.json"), str(folder / "b.json"), *args])


def test_equal_plans_differ_in_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, FILE, FILE)
    assert (result.exit_code, result.output) == (0, "")
    result = run(tmp_path, FILE, FILE, "--json")
    assert json.loads(result.stdout) == {"version": 1, "equal": True, "differences": []}


def test_the_table(tmp_path: Path) -> None:
    result = run(tmp_path, FILE, replace(plan_file(6, offload=True), plan=with_buckets(residency="backward").plan))
    assert result.exit_code == 1 and result.stderr == ""
    assert result.stdout.splitlines()[:6] == [
        "                                                     a.json   b.json",
        "decisions  residency blocks.1 .. blocks.5 (5 alike)  use      backward",
        "peaks      device                                    156 MiB  228 MiB   x1.46",
        "           host                                      -        288 MiB",
        "seconds    step                                      97 ms    111 ms    x1.14",
        "           exposed communication                     7 ms     0 s       x0",
    ]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (with_plan(stage=2), Difference("decisions", "stage", 3, 2, last="stage")),
        (with_plan(prefetch=4), Difference("decisions", "prefetch", 1, 4, last="prefetch")),
        (with_plan(world_size=8), Difference("decisions", "world size", 2, 8, last="world size")),
        (replace(FILE, model="other"), Difference("decisions", "model", "model.py:make", "other", last="model")),
        (
            replace(FILE, budget={"device": 5}),
            Difference("peaks", "budget of device", 2**33, 5, last="budget of device"),
        ),
        (replace(FILE, reasons=()), Difference("other", "reasons", 7, 0)),
        (
            replace(FILE, machine=replace(FILE.machine, launch=1.0)),
            Difference("other", "machine's launch", "5e-06", "1.0"),
        ),
    ],
)
def test_one_difference(other: PlanFile, expected: Difference) -> None:
    assert expected in differences(FILE, other)


def test_a_bucket_that_only_one_has() -> None:
    found = differences(FILE, with_plan(buckets=FILE.plan.buckets[:4]))
    assert [d.title for d in found] == ["number of buckets", "bucket blocks.4 .. blocks.5 (2 alike)"]
    assert found[1].a == "blocks.4.weight [2048, 3072] float32" and found[1].b is None


def test_parameters_that_moved() -> None:
    first, second, *others = FILE.plan.buckets
    moved = (replace(first, params=first.params + second.params), replace(second, params=()), *others)
    found = differences(FILE, with_plan(buckets=moved))
    assert [(d.name, d.a, d.b) for d in found] == [
        ("bucket blocks.0", "", "blocks.1.weight [2048, 3072] float32"),
        ("bucket blocks.1", "blocks.1.weight [2048, 3072] float32", ""),
    ]


def test_many_parameters_are_counted() -> None:
    params = tuple(replace(FILE.plan.buckets[0].params[0], name=f"w{i}") for i in range(5))
    a, b = with_plan(buckets=()), with_plan(buckets=(Bucket(0, "all", params, "use"),))
    assert differences(a, b)[1].b == "w0 [2048, 3072] float32, w1 [2048, 3072] float32, 3 more"


def test_the_order_of_buckets_is_a_decision() -> None:
    found = differences(FILE, with_plan(buckets=FILE.plan.buckets[::-1]))
    assert [d.name for d in found] == ["order of buckets"]


def test_json(tmp_path: Path) -> None:
    result = run(tmp_path, FILE, with_buckets(residency="step"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["differences"] == [
        {"part": "decisions", "name": "residency blocks.1", "a": "use", "b": "step", "count": 5,
         "last": "residency blocks.5"},
    ]  # fmt: skip


changes = st.fixed_dictionaries(
    {},
    optional={
        "stage": st.integers(0, 3),
        "world_size": st.integers(1, 8),
        "prefetch": st.integers(0, 3),
        "buckets": st.lists(st.sampled_from(FILE.plan.buckets), unique=True).map(tuple),
    },
)


@given(changes, changes)
def test_plans_differ_exactly_when_a_difference_is_reported(a: dict[str, object], b: dict[str, object]) -> None:
    one, other = with_plan(**a), with_plan(**b)
    assert bool(differences(one, other)) is (one != other)
    assert isinstance(one.plan, Plan)
    assert {(d.name, d.a, d.b) for d in differences(one, other) if d.count == 1} == {
        (d.name, d.b, d.a) for d in differences(other, one) if d.count == 1
    }
