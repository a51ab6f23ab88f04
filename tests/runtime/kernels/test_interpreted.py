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


def _tables() -> list[tuple[str, list[Any]]]:
    import torch

    from zerograph.runtime.kernels.tables import blocks, table

    with torch.device("meta"):  # the default one stands for an accelerator
        made = table([[16, 32]], [[3, 4]], [0.5], torch.device("cpu"))
        tensors = [made.columns, made.shared, blocks((5, 2), 4, torch.device("cpu"))]
    return [(tensor.device.type, tensor.tolist() if not tensor.is_meta else []) for tensor in tensors]


def test_tables_are_made_on_the_host(interpreted: Callable[..., Any]) -> None:
    """From there they are sent to where the kernel runs."""
    columns, shared, programs = interpreted(_tables)
    assert columns == ("cpu", [[16, 32], [3, 4]]) and shared == ("cpu", [0.5])
    assert programs == ("cpu", [[0, 0], [0, 1], [1, 0]])
