"""Which parameters one kernel updates together, when that is looked up again, and masters that follow their copies.

Tests ``optim/states.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph.optim as native
from zerograph.optim.parts import GroupParts


def params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]


def step(optimizer: Any, *without: Tensor) -> GroupParts:
    """A step in which all have gradients but ``without``; returns what the kernels were called by."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = None if any(p is w for w in without) else torch.ones_like(p)
    optimizer.step()
    return optimizer._states.known[(0,)]


def test_a_part_is_of_one_dtype() -> None:
    mine = params(torch.float32, torch.bfloat16, torch.float32, torch.float16)
    plan = step(native.AdamW(mine))
    assert [part.indices for part in plan.parts] == [[0, 2], [1], [3]]
    assert not any(part.mastered for part in plan.parts)
    mastered = step(native.AdamW(mine, master=torch.float32))
    assert [(part.indices, part.mastered) for part in mastered.parts] == [([0, 2], False), ([1], True), ([3], True)]


def test_addresses_are_gathered_once() -> None:
    a, b = mine = params(torch.float32, torch.float32)
    optimizer = native.AdamW(mine)
    plan = step(optimizer)
    assert step(optimizer) is plan
    assert step(optimizer, b) is plan, "who has a gradient may change from step to step"
    assert step(optimizer) is plan
    optimizer.state[a]["exp_avg"] = torch.zeros(2)
    other = step(optimizer)
    assert other is not plan and step(optimizer) is other
    del optimizer.state[b]
    assert step(optimizer) is not other and optimizer.state[b]["step"].item() == 1


def test_who_has_had_no_gradient_is_no_member() -> None:
    a, b = mine = params(torch.float32, torch.float32)
    optimizer = native.AdamW(mine)
    assert step(optimizer, b).parts[0].indices == [0] and b not in optimizer.state
    assert step(optimizer).parts[0].indices == [0, 1]
    assert [optimizer.state[p]["step"].item() for p in (a, b)] == [2, 1]


def test_a_momentum_begins_with_its_first_gradient() -> None:
    a, b = mine = params(torch.float32, torch.float32)
    optimizer = native.SGD(mine, lr=0.0, momentum=0.5)
    assert step(optimizer, b).parts[0].fresh == [False]
    plan = step(optimizer)
    assert [optimizer.state[p]["momentum_buffer"].tolist() for p in (a, b)] == [[1.5, 1.5], [1.0, 1.0]]
    assert plan.parts[0].fresh == [False, False]


def test_autograd_hears_of_what_changed_and_of_nothing_else() -> None:
    a, b = mine = params(torch.float32, torch.float32)
    optimizer = native.AdamW(mine)
    step(optimizer)
    before = a._version, b._version
    step(optimizer, b)
    assert (a._version, b._version) == (before[0] + 1, before[1])


@pytest.mark.parametrize("element", [0, 1])
def test_a_master_follows_a_copy_that_was_changed(element: int) -> None:
    """Element by element: what was not touched keeps what rounding would lose."""
    (mine,) = params(torch.bfloat16)
    optimizer = native.SGD([mine], lr=2.0**-12, master=torch.float32)
    step(optimizer)
    master = optimizer.state[mine]["master"]
    kept = 1 - 2.0**-12
    assert master.tolist() == [kept] * 2 and mine.tolist() == [1.0, 1.0]
    with torch.no_grad():
        mine[element] = 3.0
    step(optimizer)
    wanted = [1 - 2.0**-11] * 2
    wanted[element] = 3 - 2.0**-12
    assert master.tolist() == wanted
