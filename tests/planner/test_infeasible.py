"""A step that fits no plan: the error says what is missing, when, and what would help."""

from __future__ import annotations

from planner.steps import Layer, step_of

from zerograph.machine import machine_named
from zerograph.planner.infeasible import infeasible
from zerograph.planner.search import Search, Wish

MACHINE = machine_named("h100-80gb")


def test_need_have_moment_tensor_and_knobs() -> None:
    step = step_of([Layer(rows=2**20, stream=2**20, inside=2**26, flops=10**9)] * 8)
    search = Search(step, Wish(1, 4, bucket_size=2**26, prefetch=4, recompute="none"), MACHINE)
    error = infeasible(search, step, MACHINE, 300 * 2**20)
    first, second = str(error).split("\n\n")[0].splitlines()
    assert first.startswith("the step needs 1.")
    assert "may use 300 MiB" in first
    assert second.startswith("most is held in backward blocks.7 (model.py:8): 24 MiB of shards and optimizer states, ")
    assert "(model.py:8) and what lives as long" in second
    assert 'recompute="full": ' in error.hint
    assert "then it fits" in error.hint
    assert "world size 8: 12 MiB less" in error.hint
    assert error.hint.endswith(" more memory")


def test_states_alone_may_be_too_much() -> None:
    step = step_of([Layer(rows=2**20, stream=1024, inside=4096)] * 4)
    search = Search(step, Wish("auto", 4), MACHINE)
    error = infeasible(search, step, MACHINE, 2**20)
    assert "MiB of shards and optimizer states" in str(error)
    assert "world size 8" in error.hint
