"""Ranks that measure, and ranks that fail.

Tests ``measure/job.py``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from zerograph.core.errors import RankError
from zerograph.measure import QUICK
from zerograph.measure.crew import run_ranks
from zerograph.measure.job import Job
from zerograph.measure.timing import ROUNDS


def test_a_rank_that_fails_names_itself_and_why() -> None:
    before = dict(os.environ)
    with pytest.raises(RankError, match=r"rank \d failed: RuntimeError: .*(negative dimension|non-negative)"):
        run_ranks(Job("cpu", 2, replace(QUICK, elements=-1)), lambda text: None)
    assert dict(os.environ) == before


@pytest.mark.slow
def test_every_all_gather_of_all_rounds_is_reported() -> None:
    reports = run_ranks(Job("cpu", 2, QUICK), lambda text: None)
    for report in reports:
        assert [size for size, _ in report.gathers] == list(QUICK.gathers)
        assert all(len(rounds) == ROUNDS for _, rounds in report.gathers)
        assert all(min(seconds) > 0 for _, rounds in report.gathers for seconds in rounds)


def test_threads_of_a_rank() -> None:
    assert Job("cpu", 2, QUICK).threads == 1
    assert Job("cuda", 1, QUICK).threads == len(os.sched_getaffinity(0))
    assert Job("cuda", 10**6, QUICK).threads == 1
