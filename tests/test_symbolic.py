"""A step traced once, evaluated at other sizes, is the step that is traced at those sizes."""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from models import GPT, MLP, Halving, Padded, Rigid, Windows, ids, llama

from zerograph.core.errors import SizeError, UnsupportedError
from zerograph.core.machine import machine_named
from zerograph.core.step import Step
from zerograph.dryrun.compile_only import Captured, compile_only
from zerograph.planner.search import Search, Wish
from zerograph.steps import Steps
from zerograph.symbolic import Condition, Name, SymbolicStep, symbols
from zerograph.vary import Vary

WORLD = 4
BOTH: tuple[Name, ...] = ("batch", "seq")
Make = Callable[[], Any]


def captured(make: Make, sizes: dict[Name, int], open_: tuple[Name, ...]) -> SymbolicStep:
    with pytest.raises(Captured) as found:
        compile_only(make, world_size=WORLD, vary=Vary(dict(sizes), open=open_))
    return found.value.step


@functools.cache
def symbolic(name: str) -> SymbolicStep:
    """The step of one of ``MODELS``, traced once for all tests: that takes seconds."""
    return captured(MODELS[name], {}, BOTH)


def concrete(make: Make, sizes: dict[Name, int]) -> Step:
    """The step as it is traced at these very sizes, with nothing open."""
    return captured(make, sizes, ()).traced


def shape_of(step: Step, *, sources: bool = True) -> dict[str, Any]:
    """All of ``step`` but the names that torch gives its nodes."""
    names = {value.name: i for i, value in enumerate(step.values)}
    return {
        "values": [(v.bytes, v.kind, names.get(v.alias_of)) for v in step.values],
        "ops": [
            (op.target, op.phase, [names[r] for r in op.reads], [names[w] for w in op.writes], op.params)
            + (op.flops, op.moved, op.cheap, op.again)
            + ((op.module, op.source) if sources else ())
            for op in step.ops
        ],
        "params": step.params,
        "outputs": [names[name] for name in step.outputs],
    }


MODELS: dict[str, Make] = {
    "gpt": lambda: (GPT(positions=128, sliced=True), ids()),
    "loss": lambda: (GPT(dropout=0.1, loss=True, positions=128), ids()),
    "quotients": lambda: (Halving(), ids()),
    "llama": llama,
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt", [(3, 40), (128, 7)]), ("loss", [(3, 40)]), ("quotients", [(3, 40), (128, 7)]), ("llama", [(128, 7)])],
)
def test_it_is_the_step_of_every_batch_and_sequence(name: str, sizes: list[tuple[int, int]]) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    step = symbolic(name)
    assert step.sizes == {"batch": 2, "seq": 12} and step.fixed == {}
    for batch, seq in sizes:
        expected = concrete(MODELS[name], {"batch": batch, "seq": seq})
        assert shape_of(step.at(batch=batch, seq=seq)) == shape_of(expected), (batch, seq)
    assert step.at() == step.traced


def test_vectors_have_a_batch_only() -> None:
    def make() -> Any:
        return MLP(), (torch.zeros(8, 16), torch.zeros(8, 4))

    step = captured(make, {}, ("batch",))
    for batch in (1000,):
        # What the loss is divided by is a tensor in a dynamic graph, and what multiplies by it has lost its source.
        expected = shape_of(concrete(make, {"batch": batch}), sources=False)
        assert shape_of(step.at(batch=batch), sources=False) == expected
    with pytest.raises(SizeError, match="seq is fixed: no dimension of the model's inputs is taken for it"):
        step.at(seq=4)
    with pytest.raises(UnsupportedError, match="no dimension that is taken for seq"):
        captured(make, {}, BOTH)


def test_cheap_is_decided_at_the_size_and_not_where_it_was_traced() -> None:
    """The sum over the batch is a quarter of what it reads, or less, from some batch on."""
    step = symbolic("gpt")
    open_questions = [i for i, cheap in enumerate(step.cheap) if not isinstance(cheap, bool)]
    assert open_questions
    small, large = step.at(batch=2, seq=2), step.at(batch=64, seq=64)
    assert any(small.ops[i].cheap != large.ops[i].cheap for i in open_questions)


def test_one_is_a_constant_to_tracing_and_not_in_the_trace() -> None:
    step = symbolic("loss")
    with pytest.raises(SizeError, match="holds where batch >= 2"):
        step.at(batch=1)
    alone = concrete(MODELS["loss"], {"batch": 1})
    assert len(alone.ops) != len(step.traced.ops)  # if these became equal, 1 might be answered too
    assert shape_of(Steps(MODELS["loss"], "batch", world=WORLD, batch=1, seq=1).at(1)) == shape_of(alone)


def test_a_dimension_that_the_model_fixes_is_reported_with_its_line() -> None:
    step = captured(lambda: (Rigid(), ids()), {}, BOTH)
    assert step.sizes == {"batch": 2}
    with pytest.raises(SizeError, match=r"seq is fixed: the model computes with exactly 12 \(.*models.py:\d+\)"):
        step.at(seq=24)
    with pytest.raises(UnsupportedError, match="nothing to solve for: seq is fixed, the model computes with exactly"):
        Steps(lambda: (Rigid(), ids()), "seq", world=WORLD, batch=2, seq=12)


def test_tables_limit_positions() -> None:
    """Nothing in tracing asks whether a position is in the table."""
    step = symbolic("loss")
    step.at(seq=128)
    with pytest.raises(SizeError, match=r"holds where seq - 1 < 128 \(.*models.py:\d+\)"):
        step.at(seq=129)
    steps = Steps(MODELS["gpt"], "seq", world=WORLD, batch=1, seq=1)
    steps.at(128)
    for size in (129, 1000):
        with pytest.raises(SizeError, match="the model needs seq <= 128"):
            steps.at(size)


def test_where_tracing_goes_another_way_the_model_is_traced_again() -> None:
    def make() -> Any:
        return Padded(), ids(2, 16)

    steps = Steps(make, "seq", world=WORLD, batch=1, seq=1)
    for seq in (24, 13, 1):
        assert shape_of(steps.at(seq)) == shape_of(concrete(make, {"seq": seq})), seq
    assert len(steps._traced) == 2


def test_code_for_one_size_answers_for_that_size_alone() -> None:
    """And a size that has no step leaves the others as they are."""

    def make() -> Any:
        return Windows(), ids(2, 16)

    steps = Steps(make, "seq", world=WORLD, batch=1, seq=1)
    with pytest.raises(SizeError, match=r"the model needs .* at seq 20"):
        steps.at(20)
    usual, special = steps.at(56), steps.at(64)
    assert any("relu" in op.target for op in special.ops)
    assert special is steps.at(64)
    for size in (72, 128):
        assert [op.target for op in steps.at(size).ops] == [op.target for op in usual.ops]
    assert len(steps._traced) == 1


def made_up(*conditions: Condition) -> SymbolicStep:
    """A step of nothing, under these conditions on the sequence."""
    return SymbolicStep(Step((), (), (), True), {"seq": 16}, {}, (), (), (), (), conditions)


def test_of_several_broken_conditions_it_is_not_known_which_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seq = symbols()["seq"]
    step = made_up(Condition(sympy.Ne(seq % 8, 4)), Condition(sympy.Lt(seq, 64)))
    asked = []

    def trace(_: Steps, size: int | None) -> SymbolicStep:
        asked.append(size)
        if size is not None and size % 8 == 4:
            raise UnsupportedError("no multiple of 8")
        return step if size is None else made_up(Condition(sympy.Ge(seq, 64)))

    monkeypatch.setattr(Steps, "_trace", trace)
    steps = Steps(lambda: None, "seq", world=1, batch=1, seq=1)
    for size in (100, 100):
        with pytest.raises(SizeError):
            steps.at(size)
    assert steps.at(96) and asked == [None, 100, 96]
    with pytest.raises(SizeError):
        steps.at(12)
    with pytest.raises(SizeError):
        steps.at(20)  # the one condition that 12 broke
    assert asked == [None, 100, 96, 12]


def test_a_condition_may_divide_by_what_another_keeps_from_being_zero() -> None:
    seq = symbols()["seq"]
    quotient, rest = (
        sympy.Function(name, integer=True)(64, sympy.Function("floordiv", integer=True)(seq, 8))
        for name in ("floordiv", "mod")
    )
    step = made_up(Condition(sympy.Eq(rest, 0)), Condition(sympy.Gt(quotient, 1)), Condition(sympy.Ge(seq, 8)))
    assert step.broken({"seq": 16}) is None
    assert [str(c) for c in step.all_broken({"seq": 4})] == ["floordiv(64, floordiv(seq, 8)) > 1", "seq >= 8"]


def test_a_plan_of_the_evaluated_step_is_that_of_the_compiled_one() -> None:
    """Both as the search finds it, and as the backend does when it compiles at that size."""
    machine, budget = machine_named("h100-80gb"), 4 * 2**20
    sizes: dict[Name, int] = {"batch": 6, "seq": 48}
    options: dict[str, Any] = {"stage": "auto", "memory": budget, "machine": machine}
    compiled = compile_only(MODELS["gpt"], world_size=WORLD, vary=Vary(dict(sizes)), **options).frames[-1]
    step = symbolic("gpt").at(**sizes)
    assert shape_of(step) == shape_of(compiled.step)
    found = Search(step, Wish("auto", WORLD), machine).within(int(budget * 0.94))
    assert found is not None and found.plan.digest == compiled.plan.digest


def test_it_is_plain_data() -> None:
    step = symbolic("quotients")
    again = pickle.loads(pickle.dumps(step))
    assert again == step
    assert again.at(batch=5, seq=33) == step.at(batch=5, seq=33)


def test_deep_steps_are_evaluated_in_a_moment() -> None:
    """A step repeats its expressions, so that depth costs making operations and no arithmetic."""
    step = symbolic("gpt")
    repeated = SymbolicStep(
        traced=Step(step.traced.ops * 100, step.traced.values * 100, step.traced.params, True),
        sizes=step.sizes,
        fixed=step.fixed,
        **{part: getattr(step, part) * 100 for part in ("bytes", "flops", "moved", "cheap")},
    )
    assert len(repeated.traced.ops) > 10_000
    seconds = []
    for batch in (16, 32, 64):  # the garbage of earlier tests may be collected in one of them
        start = time.process_time()
        repeated.at(batch=batch, seq=512)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5
