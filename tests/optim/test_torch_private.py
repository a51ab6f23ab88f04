"""What watching optimizers needs of torch: there, and of use, on the installed torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zerograph.optim as native
from zerograph.optim import torch_private


@pytest.fixture
def calls() -> Iterator[list[tuple[str, str]]]:
    """Names of optimizers whose step raised, each with its error."""
    found = list[tuple[str, str]]()
    handle = torch_private.register_failed_step_hook(lambda o, error: found.append((type(o).__name__, str(error))))
    yield found
    handle.remove()


def _raise(*_: Any) -> None:
    raise ValueError("boom")


class Early(torch.optim.SGD):
    """Has an optimizer before anybody watches."""

    def step(self, closure: Any = None) -> None:
        _raise()


class Other(torch.optim.Optimizer):
    """Adds nothing."""


class EarlyOfTwo(Early, Other):
    """Is a subclass of two optimizers."""

    def step(self, closure: Any = None) -> None:
        _raise()


EARLY = {kind: kind([nn.Parameter(torch.ones(2))]) for kind in (Early, EarlyOfTwo)}


class Late(torch.optim.SGD):
    """Has none."""

    def step(self, closure: Any = None) -> None:
        _raise()


@pytest.mark.parametrize("kind", [Early, EarlyOfTwo, Late, torch.optim.AdamW, torch.optim.LBFGS, native.AdamW])
def test_a_step_that_raises_is_reported_once(kind: type, calls: list[tuple[str, str]]) -> None:
    for optimizer in (kind([nn.Parameter(torch.ones(2))]), *([EARLY[kind]] if kind in EARLY else [])):
        scheduler = LambdaLR(optimizer, lambda _: 1.0)
        calls.clear()
        with pytest.raises(ValueError, match="boom"):
            optimizer.step(_raise)
        assert calls == [(kind.__name__, "boom")]
        assert optimizer._opt_called and scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_a_hook_of_the_user_is_a_part_of_the_step(calls: list[tuple[str, str]]) -> None:
    for kind in (torch.optim.SGD, native.SGD):
        for register in ("register_step_pre_hook", "register_step_post_hook"):
            optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
            getattr(optimizer, register)(_raise)
            with pytest.raises(ValueError, match="boom"):
                optimizer.step()
    assert calls == [("SGD", "boom")] * 4


def test_a_step_by_another_name(calls: list[tuple[str, str]]) -> None:
    optimizer = native.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_step_pre_hook(_raise)
    with pytest.raises(ValueError, match="boom"):
        optimizer.start_step()
    assert calls == [("AdamW", "boom")]


def test_a_step_that_returns_and_a_hook_that_is_gone_are_not_reported() -> None:
    found = list[BaseException]()
    handle = torch_private.register_failed_step_hook(lambda _, error: found.append(error))
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    assert optimizer.step(lambda: 3.0) == 3.0 and weight.tolist() == [0.5, 0.5]
    handle.remove()
    with pytest.raises(ValueError, match="boom"):
        optimizer.step(_raise)
    assert not found
    assert torch.optim.SGD.step.hooked, "torch puts its hooks around a step once"


def test_compiled_steps_are_reported_too(calls: list[tuple[str, str]]) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    assert weight.tolist() == [0.5, 0.5] and not calls
    optimizer.register_step_pre_hook(_raise)
    with pytest.raises(ValueError, match="boom"):
        step()
    assert calls == [("SGD", "boom")]
