"""The largest size that fits: it does, and the next does not.

Tests ``planner/search/furthest.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, step_of
from quick import examples

from zerograph.core.errors import SizeError
from zerograph.core.machine import Tier, machine_named
from zerograph.core.step import Step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.largest_size import largest_size
from zerograph.planner.search.search import Search

MACHINE = machine_named("h100-80gb")
LAYERS = [Layer(rows=10**5, stream=4096, inside=16384)] * 3


def sized(n: int, squared: int = 0) -> Step:
    """A step whose activations grow with ``n``, those inside of layers maybe with its square."""
    layers = [replace(x, stream=x.stream * n, inside=x.inside * n + squared * n * n) for x in LAYERS]
    return step_of(layers)


class Asked:
    """Candidates by size, and how often they were asked for."""

    def __init__(self, squared: int = 0, most: int = 2**40) -> None:
        self.squared, self.most, self.sizes = squared, most, list[int]()

    def __call__(self, size: int) -> Search:
        if size > self.most:
            raise SizeError(f"no more than {self.most}", "a hint")
        self.sizes.append(size)
        return Search(sized(size, self.squared), Constraints(3, 8, 4096, 1), MACHINE)


@settings(max_examples=examples(25), deadline=None)
@given(
    budget=st.integers(10**6, 3 * 10**8),
    start=st.integers(1, 5000),
    squared=st.sampled_from([0, 1, 64]),
)
def test_the_largest_fits_and_the_next_does_not(budget: int, start: int, squared: int) -> None:
    asked = Asked(squared)
    found = largest_size(asked, budget, start)
    needs = Asked(squared)
    if found.value:
        assert needs(found.value).within(budget) is not None
    assert needs(found.next).within(budget) is None
    assert found.next == found.value + 1
    assert found.need == needs(found.next).smallest.peak and not found.limit
    assert found.search.smallest.peak == needs(max(found.value, 1)).smallest.peak
    assert len(asked.sizes) == len(set(asked.sizes)) <= 20


def test_needs_on_a_line_are_found_in_a_few_steps() -> None:
    asked = Asked()
    largest_size(asked, 200 * 10**6, 8)
    assert len(asked.sizes) <= 7  # needs have kinks, where another moment becomes the peak


def test_a_model_may_end_before_the_memory_does() -> None:
    found = largest_size(Asked(most=1000), 10**12, 8)
    assert (found.value, found.need, found.limit) == (1000, None, "no more than 1000")


def test_nothing_fits() -> None:
    found = largest_size(Asked(), 1000, 8)
    assert found.value == 0 and found.search.smallest.peak == found.need


def test_without_any_step_there_is_no_answer() -> None:
    with pytest.raises(SizeError, match="no more than 0"):
        largest_size(Asked(most=0), 10**9, 4)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(device=st.integers(3 * 10**6, 3 * 10**7), host=st.integers(10**6, 10**8), start=st.integers(1, 500))
def test_over_several_tiers_the_largest_fits_and_the_next_does_not(device: int, host: int, start: int) -> None:
    def search(size: int) -> Search:
        return Search(sized(size), Constraints(3, 8, 4096, 1, offload="auto", tier="host"), MACHINE, work=300)

    budget: dict[Tier, int] = {"device": device, "host": host}
    found = largest_size(search, budget, start)
    if found.value:
        assert search(found.value).within(budget) is not None
        assert found.held <= budget[found.tier]
    assert search(found.next).within(budget) is None
    assert found.need is not None and found.need > budget[found.tier]
