"""Wires where parameters are on an accelerator, or on the host beside it: Triton's kernels encode and decode them on a
GPU, and torch's operators on another device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.accelerator import on_it
from numerics.host_cases import on_host
from numerics.test_offload import Run, adamw
from ranks import run

from zerograph.core.step import wire_bytes
from zerograph.runtime.comm.wires import decode, encode


def _near_the_exact(options: dict[str, Any]) -> None:
    exact, wired = (Run(adamw, **options, **w) for w in ({}, {"gather_wire": "int8", "reduce_wire": "int8"}))
    for training in (exact, wired):
        training.steps(3)
    assert wired.losses == pytest.approx(exact.losses, rel=0.02)
    assert wired.losses != exact.losses


def _trained(stage: int, offload: str) -> None:
    _near_the_exact({"stage": stage, **(on_host(offload) if offload else {})})


@pytest.mark.parametrize(("stage", "offload"), [(3, ""), (2, ""), (3, "parameters")])
def test_training_is_near_that_without(stage: int, offload: str) -> None:
    run(2, on_it, _trained, stage, offload)


@pytest.mark.parametrize("wire", ["bf16", "fp8", "int8", "int4", "sign"])
def test_bytes_are_those_of_a_cpu(wire: str) -> None:
    run(1, on_it, _bytes, wire)


def _bytes(wire: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 5000)
    values[1, 2000] = float("inf")
    found = []
    for device in (torch.device("cpu"), Run.device):
        message = torch.zeros(3, wire_bytes(wire, 5000), dtype=torch.uint8, device=device)
        out = torch.empty(3, 5000, device=device)
        encode(wire, values.to(device), message)
        decode(wire, message, out)
        found.append((message.cpu(), out.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0, equal_nan=True)
