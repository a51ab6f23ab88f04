"""What the search of a plan within a budget puts in tiles, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerograph.core.errors import InfeasibleError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import machine_named
from zerograph.dryrun.forecast import plan_file
from zerograph.planner.explain.check_file import check_file

pytestmark = pytest.mark.costly

WIDTH, SAMPLES, TOKENS = 64, 16, 128
MIB = 2**20


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Linear(16 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(memory: int, **options: Any) -> PlanFile:
    gpu = machine_named("h100-80gb")
    machine = gpu.with_memory(memory)
    asked = {"stage": 3, "offload": "parameters", "tier": "nvme", **options}
    return plan_file("layers", lambda: (Layers(), (torch.zeros(SAMPLES, TOKENS, WIDTH),)), machine, world=2, **asked)


def test_layers_run_for_parts_of_the_batch_only_where_nothing_fits_without() -> None:
    ample, tight = planned(64 * MIB), planned(6 * MIB)
    assert ample.plan.token_tiles == 1
    assert tight.plan.token_tiles > 1 and len(tight.plan.token_regions) == 4
    assert set(tight.plan.recompute) == {f"layers.{i}" for i in range(4)}
    assert tight.forecast.peaks["device"].bytes <= 6 * MIB
    assert tight.forecast.seconds > ample.forecast.seconds
    assert not check_file(tight)


@pytest.mark.parametrize("fixed", [{"batch_tiles": 1, "token_tiles": 1}, {"recompute": "none"}])
def test_what_the_user_has_fixed_stays(fixed: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleError, match="of device memory per rank"):
        planned(6 * MIB, **fixed)


def test_the_error_tells_what_the_widest_search_needs() -> None:
    with pytest.raises(InfeasibleError, match=r"the step needs ([\d.]+) MiB of device memory") as caught:
        planned(MIB)
    with pytest.raises(InfeasibleError, match=r"the step needs ([\d.]+) MiB of device memory") as fixed:
        planned(MIB, batch_tiles=1, token_tiles=1)

    def need(error: InfeasibleError) -> float:
        return float(str(error).split("needs ")[1].split(" MiB")[0])

    assert need(caught.value) < need(fixed.value)
