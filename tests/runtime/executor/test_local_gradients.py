"""Who takes gradients that are not averaged, and who may not read them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from zerograph.core.errors import UnsupportedError
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.late_gradients import complete
from zerograph.runtime.executor.local_gradients import LocalGradients, refuse_reading, taker


class Optimizer:
    """Takes gradients of what is in ``wanted``."""

    def __init__(self, *wanted: Tensor) -> None:
        self.wanted = list(wanted)
        self.local = LocalGradients("Mine", self.params)

    def params(self) -> list[Tensor]:
        return self.wanted


def test_an_optimizer_takes_those_of_its_parameters_while_it_lives_and_wants_them() -> None:
    mine, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Optimizer(mine)
    assert taker([mine, other]) is optimizer.local and taker([other]) is None
    accumulation = GradientAccumulation({"mine": mine})
    assert accumulation.active and accumulation.taker is optimizer.local
    assert not GradientAccumulation({"other": other}).active
    optimizer.wanted.clear()
    assert not accumulation.active
    optimizer.wanted.append(mine)
    del optimizer
    gc.collect()
    assert taker([mine]) is None and not accumulation.active


def test_readers_of_averages_are_refused() -> None:
    mine, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Optimizer(mine)
    refuse_reading([other])
    complete([other])
    for reads in (refuse_reading, complete):
        with pytest.raises(UnsupportedError, match=r"Mine averages momenta[\s\S]*hint: clip gradients in steps before"):
            reads([other, mine])
    optimizer.wanted.clear()
    complete([mine])


def test_trainable_parameters_that_an_optimizer_leaves_out() -> None:
    params = {name: nn.Parameter(torch.ones(2), requires_grad=name != "frozen") for name in ("w", "v", "frozen")}
    accumulation = GradientAccumulation(params)
    assert accumulation.left_out({id(params["w"])}) == ["v"]
    assert accumulation.left_out(set(map(id, params.values()))) == []
