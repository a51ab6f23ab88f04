"""Plans whose programs hold more than the search counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerograph.core.errors import InfeasibleError
from zerograph.dryrun.forecast import within
from zerograph.planner.estimate.estimate import RESERVE

FRONTIER = ((13, 20, 1.0), (10, 10, 2.0), (8, 8, 3.0))
"""Bytes that the search counts and that the programs hold, and seconds: the fastest first."""


def found(budget: int) -> tuple[float, int]:
    """Seconds and bytes of the plan that a budget gets."""

    def planned_file(memory: int | None = None) -> tuple[Any, int]:
        most = budget if memory is None else int(memory * (1 - RESERVE))
        fits = [plan for plan in FRONTIER if plan[0] <= most]
        if not fits:
            raise InfeasibleError("too little")
        searched, holds, seconds = fits[0]
        forecast = SimpleNamespace(peaks={"device": SimpleNamespace(bytes=holds)}, seconds=seconds)
        return SimpleNamespace(forecast=forecast, budget={"device": budget}), searched

    file = within(planned_file)
    return file.forecast.seconds, file.forecast.peaks["device"].bytes


def test_more_memory_is_never_slower_and_what_is_found_fits() -> None:
    assert [found(budget)[0] for budget in (8, 10, 12, 13, 19, 20, 30)] == [3, 2, 2, 2, 2, 1, 1]
    assert all(found(budget)[1] <= budget for budget in (8, 10, 13, 19, 20))


def test_where_nothing_holds_less_the_last_is_shown() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.FRONTIER", ((5, 9, 1.0),))
        assert found(6) == (1.0, 9)
