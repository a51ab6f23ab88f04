"""Updates of all parameters together: in one order on all ranks, whatever parts each of them has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from numerics.compare import Values, assert_same, full_values, seeded
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.optim import LAMB, Muon


class Uneven(nn.Module):
    """Of the rows of all weights but the first, the last of four ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(i, o, bias=False) for i, o in ((4, 8), (8, 5), (5, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x))))).square().mean()


def _trained(optimizer: type[Muon | LAMB], **options: str) -> Values:
    torch._dynamo.reset()
    model = Uneven()
    model.compile(backend=zerograph.backend(stage=3, compute="eager", **options))
    update = optimizer(model.parameters(), lr=0.05)
    for seed in range(3):
        model(torch.randn(6, 4, generator=seeded(seed))).backward()
        update.step()
        update.zero_grad()
    return full_values(model)


def _same(optimizer: type[Muon | LAMB], folder: str) -> None:
    assert_same(_trained(optimizer, offload="optimizer", tier="nvme", path=folder), _trained(optimizer))


@pytest.mark.parametrize("optimizer", [Muon, LAMB])
def test_a_rank_without_rows_of_a_parameter_keeps_the_order(optimizer: type[Muon | LAMB], tmp_path: Path) -> None:
    run(4, _same, optimizer, str(tmp_path))
