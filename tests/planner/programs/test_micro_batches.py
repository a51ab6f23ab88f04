"""Accumulation: what a loop of backwards takes beside one micro-batch, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import machine_named
from zerograph.dryrun.forecast import plan_file
from zerograph.planner.explain.check_file import check_file

WORLD, ROWS = 2, 256
WEIGHTS = 4 * 2 * ROWS * 4 * ROWS  # elements
GPU = machine_named("h100-80gb")


class Layers(nn.Module):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(ROWS, 4 * ROWS, False), nn.GELU(), nn.Linear(4 * ROWS, ROWS, False))
            for _ in range(4)
        )
        self.layers[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(frozen: int = 0, **options: Any) -> PlanFile:
    make: Callable[[], Any] = lambda: (Layers(frozen), (torch.zeros(4, 64, ROWS),))  # noqa: E731
    return plan_file("layers", make, GPU, world=WORLD, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 3},
        {"stage": 3, "offload": "parameters", "tier": "nvme"},
        {"stage": 3, "offload": "optimizer", "tier": "host"},
    ],
)
def test_a_loop_takes_its_passes_again_and_holds_gradients(options: dict[str, Any]) -> None:
    one, many = planned(**options), planned(**options, micro_batches=8)
    assert not check_file(many)
    assert PlanFile.from_json(many.to_json()) == many
    assert many.seconds == many.forecast.seconds + many.earlier
    passes = many.earlier / 7
    assert 0 < passes < many.forecast.seconds
    assert many.tokens_per_second > one.tokens_per_second  # one update for all
    left = [h for h in many.holdings if h.kind == "gradient" and h.first == h.last == -1]
    size = 4 * WEIGHTS // (WORLD if options["stage"] == 3 else 1)
    assert sum(h.bytes for h in left) == size
    where = "device" if "offload" not in options else options["tier"]
    assert {h.tier for h in left} == {where}


@pytest.mark.parametrize("options", [{}, {"offload": "gradients", "tier": "host"}])
def test_what_is_frozen_leaves_no_gradient(options: dict[str, Any]) -> None:
    file = planned(frozen=3, **options, micro_batches=2)
    assert not check_file(file)
    left = sum(h.bytes for h in file.holdings if h.kind == "gradient" and h.first == h.last == -1)
    assert left == 4 * WEIGHTS // WORLD // 4


def test_below_stage_2_only_the_last_micro_batch_communicates() -> None:
    one, three = planned(stage=1, micro_batches=8), planned(stage=3, micro_batches=8)
    computing = sum(s.end - s.start for s in one.forecast.spans if s.stream == "compute" and s.phase != "update")
    assert one.earlier == pytest.approx(7 * computing)
    assert one.earlier < three.earlier


def test_gradients_that_are_spilled_are_brought_again_to_be_added_to() -> None:
    def moved(file: PlanFile) -> float:
        return file.forecast.busy()["nvme_read"]

    options = {"offload": "parameters", "tier": "nvme"}
    assert moved(planned(**options, micro_batches=2)) > moved(planned(**options))


def test_a_file_whose_earlier_micro_batches_were_changed_fails_its_check() -> None:
    file = planned(micro_batches=4)
    (wrong,) = check_file(replace(file, earlier=2 * file.earlier))
    assert wrong.check == "forecast"
    assert "earlier micro-batches" in wrong.message


def test_updates_beside_a_micro_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 micro-batches: updates would stand beside the first"):
        planned(offload="parameters", tier="host", overlap="forward", micro_batches=8)
