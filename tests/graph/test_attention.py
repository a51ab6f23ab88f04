"""Which operators draw random numbers."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder

from zerograph.graph.attention import ATTENTION, ATTENTION_BACKWARD, is_random

aten = torch.ops.aten


@pytest.mark.parametrize(("args", "random"), [((), False), ((0.0,), False), ((0.1,), True)])
def test_attention_is_random_with_dropout_only(args: tuple[float, ...], random: bool) -> None:
    b = Builder()
    heads = [b.input(name, 2, 2, 4, 8) for name in "qkv"]
    assert is_random(b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, *heads, *args)) is random


def test_other_operators_are_what_torch_says() -> None:
    b = Builder()
    x = b.input("x", 2, 4)
    assert is_random(b.call(aten.rand_like.default, x)) and not is_random(b.call(aten.relu.default, x))
    assert not is_random(x)


def test_each_kernel_has_its_backward() -> None:
    names = {op.name().partition("::")[2].partition(".")[0] for op in ATTENTION}
    assert {f"{name}_backward" for name in names if not name.endswith("_backward")} <= names
    assert len(ATTENTION) == 2 * len(ATTENTION_BACKWARD)
