"""Muon and LAMB with parameters on an accelerator, or on the host beside it, as where each rank has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.accelerator import on_it
from numerics.host_cases import on_host
from numerics.test_offload import Run
from optim.algorithms.test_lamb import of as lamb
from optim.algorithms.test_muon import of as muon
from ranks import run


def _as_whole(make: Any, offload: str) -> None:
    """Sums over ranks and batches of other sizes round otherwise, of which Newton-Schulz makes more: with AMX, whose
    products in bfloat16 depend on the batch, one element of 3600 differs by 1.1e-3."""
    whole, training = Run(make, stage=0), Run(make, stage=3, **(on_host(offload) if offload else {}))
    for one in (whole, training):
        one.steps(3, clip=1.0)
    assert training.losses == pytest.approx(whole.losses, rel=1e-3)
    expected = whole.result()[1]
    for name, value in training.result()[1].items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("offload", ["", "optimizer", "parameters"])
@pytest.mark.parametrize("make", [muon, lamb], ids=["muon", "lamb"])
def test_training_is_that_of_whole_parameters(make: Any, offload: str) -> None:
    run(2, on_it, _as_whole, make, offload)
