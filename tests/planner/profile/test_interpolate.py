"""Numbers of a step at a size that was not traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.steps import Layer, step_of

from zerograph.core.step import Lookup, Step
from zerograph.planner.profile.interpolate import interpolated, outline


def sized(n: int, squared: int = 0) -> Step:
    """A step whose activations grow with ``n``, those inside of layers maybe with its square."""
    layers = [Layer(stream=64 + 4 * n, inside=16 * n + squared * n * n, flops=10**6 + 7 * n)] * 3
    return replace(step_of(layers), lookups=(Lookup(n + 1, 1000, "model.py:3"),))


@given(sizes=st.lists(st.integers(2, 10**6), min_size=2, max_size=3, unique=True), size=st.integers(1, 10**7))
def test_what_grows_in_proportion_is_interpolated_from_two_sizes(sizes: list[int], size: int) -> None:
    assert interpolated({n: sized(n) for n in sizes}, size) == sized(size)


@given(sizes=st.lists(st.integers(2, 10**5), min_size=3, max_size=3, unique=True), size=st.integers(1, 10**6))
def test_what_grows_with_the_square_is_interpolated_from_three(sizes: list[int], size: int) -> None:
    assert interpolated({n: sized(n, 3) for n in sizes}, size) == sized(size, 3)


def test_a_size_below_all_never_takes_less_than_nothing() -> None:
    steps = {n: step_of([Layer(stream=n - 90)]) for n in (100, 200)}
    assert min(value.bytes for value in interpolated(steps, 1).values) == 0


def test_the_outline_is_that_of_all_sizes_and_of_no_other_step() -> None:
    step = sized(5)
    assert outline(step) == outline(sized(6, 1))
    cheap = replace(step, ops=(replace(step.ops[0], cheap=not step.ops[0].cheap), *step.ops[1:]))
    for other in (cheap, replace(step, outputs=()), replace(step, values=step.values[:-1])):
        assert outline(other) != outline(step)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_quotients_are_rounded_up(size: int) -> None:
    found = interpolated({2: step_of([Layer(inside=1)]), 6: step_of([Layer(inside=2)])}, size)
    assert {v.bytes for v in found.values if v.name == "up0"} == {2}
