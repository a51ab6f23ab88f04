"""From seconds to links."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.machine import Link
from zerograph.measure.timing import fit_link, median_of, seconds_of

SIZES = (2**16, 2**20, 2**22, 2**25)


@given(rate=st.floats(1e7, 1e12), latency=st.floats(1e-6, 1e-2))
def test_a_link_is_found_again(rate: float, latency: float) -> None:
    link = Link(rate, latency)
    found = fit_link([(size, link.seconds(size)) for size in SIZES])
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(link.seconds(size), rel=1e-3)


@given(seconds=st.lists(st.floats(1e-6, 10), min_size=4, max_size=4))
def test_whatever_was_measured_the_link_is_one(seconds: list[float]) -> None:
    link = fit_link(list(zip(SIZES, seconds, strict=True)))
    assert link.rate > 0 and link.latency >= 0


def test_noise_of_a_fifth_moves_a_forecast_by_less_than_that() -> None:
    link = Link(3e9, 1e-4)
    noisy = [(size, link.seconds(size) * factor) for size, factor in zip(SIZES, (1.2, 0.8, 1.1, 0.9), strict=True)]
    assert fit_link(noisy).seconds(2**23) == pytest.approx(link.seconds(2**23), rel=0.2)


def test_one_size_gives_a_rate() -> None:
    assert fit_link([(2**20, 1e-3)]) == Link(2**20 / 1e-3)


def test_the_median_of_rounds_is_that_of_each_number() -> None:
    rounds = [{"link": Link(rate, latency), "name": "a", "rate": {"x": x}} for rate, latency, x in
              ((1e9, 3e-5, 8.0), (9e9, 1e-5, 2.0), (2e9, 2e-5, 4.0))]  # fmt: skip
    assert median_of(rounds) == {"link": Link(2e9, 2e-5), "name": "a", "rate": {"x": 4.0}}
    assert median_of([3, 1, 2]) == 2


def test_seconds_of_a_call() -> None:
    calls = []
    seconds = seconds_of(lambda: calls.append(time.sleep(0.01)), lambda: None, 0.05)
    assert 0.01 <= seconds < 0.03 and len(calls) >= 3
