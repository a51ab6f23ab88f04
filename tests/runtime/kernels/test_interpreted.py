"""The kernels under Triton's interpreter, against references in float64.

Of ``runtime/kernels/adamw.py``, ``runtime/kernels/sum_of_squares.py``, ``runtime/kernels/messages.py``,
``runtime/kernels/wires.py`` and ``runtime/kernels/tables.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_names import NAMES

pytest.importorskip("triton", reason="Triton is not installed: pip install -e .[kernels]")


def _run(name: str) -> None:
    from kernel_cases import CASES

    CASES[name]("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_their_references(interpreted: Callable[..., Any], name: str) -> None:
    interpreted(_run, name)
