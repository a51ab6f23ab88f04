"""Which parameters travel in fewer bits, and in how many bytes."""

from __future__ import annotations

from typing import Any

import pytest

from zerograph.core.layout import Layout
from zerograph.core.param_bytes import averaged_bytes, reduced_bytes, sent_bytes
from zerograph.core.step import Param, wire_bytes
from zerograph.core.wire import Wires

WIRES = Wires("int8", "int4")


def param(shape: tuple[int, ...] = (8, 64), ranks: int = 4, sharded: bool = True, **dtypes: str) -> Param:
    named: dict[str, Any] = {"dtype": "float32", "compute_dtype": "float32", "reduce_dtype": "float32", **dtypes}
    return Param("weight", shape, trainable=True, home=Layout.home(ranks, sharded=sharded), **named)


@pytest.mark.parametrize(
    ("given", "wires", "expected"),
    [
        (param(), WIRES, ("int8", "int4")),
        (param(), Wires(), (None, None)),
        (param(shape=(64,)), WIRES, (None, None)),
        (param(sharded=False), WIRES, (None, "int4")),
        (param(ranks=1), WIRES, (None, "int4")),  # between replicas
        (param(dtype="float64"), WIRES, (None, None)),
        (param(compute_dtype="float64"), WIRES, (None, "int4")),
        (param(compute_dtype="bfloat16"), Wires("bf16", "bf16"), (None, "bf16")),
        (param(compute_dtype="float16", reduce_dtype="float16"), Wires("bf16", "bf16"), (None, None)),
    ],
)
def test_matrices_travel_so_where_it_saves_bytes(
    given: Param, wires: Wires, expected: tuple[str | None, str | None]
) -> None:
    found = wires.of(given)
    assert (found.gather_wire, found.reduce_wire) == expected


@pytest.mark.parametrize(("wire", "elements", "expected"), [
    ("bf16", 3, 6), ("int8", 3, 4 + 4), ("fp8", 257, 260 + 8), ("int4", 257, 132 + 8), ("int4", 256, 128 + 4),
])  # fmt: skip
def test_bytes_of_elements_and_scales(wire: str, elements: int, expected: int) -> None:
    assert wire_bytes(wire, elements) == expected


def test_plans_count_what_is_sent() -> None:
    plain, found = param(shape=(1024, 64)), WIRES.of(param(shape=(1024, 64)))
    elements = 1024 * 64
    assert (sent_bytes([plain]), sent_bytes([found])) == (4 * elements, elements + elements // 64)
    assert (reduced_bytes([plain]), reduced_bytes([found])) == (4 * elements, elements // 2 + elements // 64)
    assert (averaged_bytes([plain]), averaged_bytes([found])) == (elements, elements // 8 + elements // 256)
