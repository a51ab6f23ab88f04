"""The kernels under Triton's interpreter, against references in float64.

Of ``runtime/kernels/adamw.py``, ``runtime/kernels/sum_of_squares.py``, ``runtime/kernels/messages.py``,
``runtime/kernels/linear_cross_entropy.py`` and ``runtime/kernels/tables.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e .[kernels]")

NAMES = [
    "adamw_of_lists",
    "sum_of_squares_of_lists",
    "squares_do_not_overflow",
    "messages_of_lists",
    "cross_entropy_of_tiles",
    "cross_entropy_of_many_words",
    "a_target_out_of_range_is_not_a_number",
    "an_unknown_reduction_is_an_error",
]


def _run(name: str) -> None:
    from kernel_cases import CASES

    CASES[name]("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_their_references(interpreted: Callable[..., Any], name: str) -> None:
    interpreted(_run, name)
