"""What ``delayed=True`` refuses when an optimizer is made, and where there is no backend; training is in
tests/numerics/test_delayed.py, and its misuse in test_delayed_errors.py there.

Tests ``optim/options.py`` and ``optim/owner.py`` too.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import zerograph
from zerograph.core.errors import ConfigError

OPTIMIZERS = [getattr(zerograph.optim, name) for name in ("AdamW", "Adam", "SGD", "Adagrad", "Lion")]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delayed": True, "overlap": True, "skip_nonfinite": False}, "overlap=True and delayed=True(?s:.*)leave one"),
        ({"warmup": 40}, r"warmup=40 counts ordinary steps before .*not given(?s:.*)beside delayed=True"),
        ({"delayed": True, "warmup": -1}, r"warmup=-1 counts ordinary steps(?s:.*)warmup=40 beside delayed=True"),
    ],
)
def test_options_that_do_not_go_together(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind([nn.Parameter(torch.ones(2))], **options)


def test_plain_parameters_have_no_copies() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = zerograph.optim.AdamW([weight], delayed=True, warmup=3)
    weight.grad = torch.ones(2)
    with pytest.raises(ConfigError, match=r"no backend of zerograph(?s:.*)tier=.host"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2))


def test_what_needs_an_update_that_has_ended_is_refused() -> None:
    optimizer: Any = zerograph.optim.SGD([nn.Parameter(torch.ones(2))], delayed=True)
    with pytest.raises(ConfigError, match=r"a closure with delayed=True(?s:.*)call backward"):
        optimizer.step(lambda: torch.zeros(()))
    with pytest.raises(ConfigError, match=r"start_step\(\) with delayed=True(?s:.*)step\(\)"):
        optimizer.start_step()


def test_copies_are_delayed_too() -> None:
    optimizer = zerograph.optim.Lion([nn.Parameter(torch.ones(2))], delayed=True, warmup=7)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.late.optimizer is other and other.param_groups[0]["warmup"] == 7


def test_how_many_ordinary_steps_are_to_come_is_in_state_dicts() -> None:
    optimizer, other = (zerograph.optim.SGD([nn.Parameter(torch.ones(2))], delayed=True, warmup=n) for n in (7, 40))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["warmup"] == 7
    other.load_state_dict(zerograph.optim.SGD([nn.Parameter(torch.ones(2))]).state_dict())
    assert "warmup" not in other.param_groups[0] and other.defaults["warmup"] == 40  # which it then begins with
