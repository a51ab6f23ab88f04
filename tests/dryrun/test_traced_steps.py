"""A step interpolated from a few traces is the step that is traced at that size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import GPT, MLP, Padded, Rigid, Windows, ids, llama

from zerograph.compiler.repetition.shorten import LEAST
from zerograph.core.errors import SizeError, UnsupportedError
from zerograph.core.machine import machine_named
from zerograph.core.step import Dimension, Step
from zerograph.dryrun import traced_steps
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.traced_steps import Steps
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search

pytestmark = pytest.mark.costly

WORLD = 4
Make = Callable[[], Any]


def steps_of(make: Make, what: Dimension, *traced: int) -> Steps:
    """The step of ``make`` by ``what``, traced at its own size and at these."""
    steps = Steps(make, what, world=WORLD, batch=1, seq=1)
    for size in traced:
        steps.confirm(size)
    return steps


def concrete(make: Make, **sizes: int) -> Step:
    """The step as it is traced at these very sizes."""
    return compile_only(make, world_size=WORLD, sizes=sizes, programs=False).frame.step  # type: ignore[arg-type]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are traced, as they come."""
    found: list[int] = []

    def compiled(*arguments: Any, sizes: dict[str, int], **options: Any) -> Any:
        found.extend(sizes.values())
        return compile_only(*arguments, sizes=sizes, **options)

    monkeypatch.setattr(traced_steps, "compile_only", compiled)
    return found


MODELS: dict[str, Make] = {
    "gpt": lambda: (GPT(positions=128, sliced=True), ids()),
    "table": lambda: (GPT(depth=0, positions=128, sliced=True), ids()),
    "loss": lambda: (GPT(dropout=0.1, loss=True, positions=128), ids()),
    "llama": llama,
}


@pytest.mark.parametrize(
    ("name", "what", "traced", "size"),
    [
        ("gpt", "batch", (24, 96), 100),
        ("gpt", "seq", (36, 64, 96), 61),
        ("loss", "seq", (36, 64, 96), 128),
        ("llama", "seq", (96, 256, 512), 1000),
    ],
)
def test_it_is_the_step_of_every_size(
    name: str, what: Dimension, traced: tuple[int, ...], size: int, traces: list[int]
) -> None:
    """At a few sizes like the first, what the partitioner finds cheap to compute again is not what it is beyond."""
    if name == "llama":
        pytest.importorskip("transformers")
    steps = steps_of(MODELS[name], what, *traced)
    found = steps.at(size)
    assert traces[1:] == list(traced)
    # Confirming traces at that very size, and from then on that trace is the step.
    assert steps.confirm(size) and traces[-1] == size and steps.at(size) == found


@pytest.mark.slow
def test_vectors_have_a_batch_only() -> None:
    def make() -> Any:
        return MLP(), (torch.zeros(8, 16), torch.zeros(8, 4))

    assert steps_of(make, "batch", 80).at(1000) == concrete(make, batch=1000)
    with pytest.raises(UnsupportedError, match="no dimension that is taken for seq"):
        Steps(make, "seq", world=WORLD, batch=1, seq=1)


@pytest.mark.slow
def test_one_is_a_constant_to_tracing_and_is_traced_alone(traces: list[int]) -> None:
    steps = steps_of(MODELS["loss"], "batch", 8)
    alone = steps.at(1)
    assert traces[-1] == 1 and alone == concrete(MODELS["loss"], batch=1)
    assert len(alone.ops) != len(steps.at(2).ops)  # if these became equal, 1 might be interpolated from others


@pytest.mark.slow
def test_where_operations_differ_the_model_is_traced_again(traces: list[int]) -> None:
    """Of a sequence that is no multiple of 8, and of few sequences, of which the sum is cheap to repeat."""

    def make() -> Any:
        return Padded(), ids(2, 16)

    steps = steps_of(make, "seq", 48, 160)
    assert steps.at(104) == concrete(make, seq=104) and traces == [16, 48, 160]
    assert not steps.confirm(107)  # it was interpolated as if it were a multiple
    assert steps.at(107) == concrete(make, seq=107)
    assert steps.at(106) == concrete(make, seq=106) and 106 in traces  # next to one that differs


def test_a_dimension_that_the_model_fixes_is_reported() -> None:
    make: Make = lambda: (Rigid(), ids())  # noqa: E731
    assert steps_of(make, "batch", 8).at(100) == concrete(make, batch=100)
    with pytest.raises(UnsupportedError, match="nothing to solve for: seq is fixed, the model runs at 12 only; at seq"):
        steps_of(make, "seq", 120)


@pytest.mark.slow
def test_tables_limit_positions(traces: list[int]) -> None:
    """Nothing in tracing asks whether a position is in the table, and the trace tells."""
    steps = steps_of(MODELS["loss"], "seq", 120, 240, 1200)
    assert steps.at(128) and traces == [12, 120, 240, 1200]
    with pytest.raises(SizeError, match=r"at seq 129 row 128 is read of a table of 128 \(.*models.py:\d+\)"):
        steps.at(129)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first", "asked", "end"), [("table", 12, 5000, 128), ("windows", 16, 4399, 4392)])
def test_where_the_model_ends_is_narrowed_down(name: str, first: int, asked: int, end: int, traces: list[int]) -> None:
    """At a size, or between two multiples."""
    make = MODELS[name] if name in MODELS else lambda: (Windows(), ids(2, first))
    steps = steps_of(make, "seq", first * (4000 // first)) if name == "windows" else steps_of(make, "seq")
    assert not steps.confirm(asked)
    assert steps.at(end)
    for size, end_at in ((end + 1, end + 1), (asked, asked), (2 * asked, end + 1)):
        with pytest.raises(SizeError, match=f"at seq {end_at} the model raises"):
            steps.at(size)
    assert len(traces) <= 20


@pytest.mark.slow
def test_code_for_one_size_answers_for_that_size_alone() -> None:
    steps = steps_of(lambda: (Windows(), ids(2, 16)), "seq", 32, 48)
    assert not steps.confirm(64)
    assert any("relu" in op.target for op in steps.at(64).ops)
    assert not any("relu" in op.target for op in steps.at(40).ops)


def test_a_model_of_too_many_ways_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_steps, "MOST_TRACES", 3)
    steps = steps_of(lambda: (Padded(), ids(2, 16)), "seq", 17, 33)
    with pytest.raises(UnsupportedError, match="depends on seq in too many ways: 3 traces"):
        steps.confirm(40)


def test_a_plan_of_an_interpolated_step_is_that_of_the_compiled_one() -> None:
    """Both as the search finds it, and as the backend does when it compiles at that size."""
    machine, budget = machine_named("h100-80gb"), 4 * 2**20
    options: dict[str, Any] = {"stage": "auto", "memory": budget, "machine": machine}
    compiled = compile_only(MODELS["gpt"], world_size=WORLD, sizes={"seq": 48}, **options).frame
    step = steps_of(MODELS["gpt"], "seq", 36, 96).at(48)
    # Where memory is given, plans may run layers by token, and it is looked which can.
    assert step == replace(compiled.step, token_regions=())
    found = Search(step, Constraints("auto", WORLD), machine).within(int(budget * 0.94))
    assert found is not None and found.plan.digest == compiled.plan.digest


@pytest.mark.slow
def test_a_few_layers_tell_all_of_them_at_every_size() -> None:
    make: Make = lambda: (GPT(depth=LEAST), ids())  # noqa: E731
    a = steps_of(make, "seq", 24, 48).at(100)
    b = compile_only(make, world_size=WORLD, sizes={"seq": 100}, programs=False, repeat_layers=False).frame.step
    assert [(v.bytes, v.kind) for v in a.values] == [(v.bytes, v.kind) for v in b.values]
    assert [(op.target, op.flops, op.moved, op.cheap) for op in a.ops] == [
        (op.target, op.flops, op.moved, op.cheap) for op in b.ops
    ]
