"""``torch.set_default_device`` says where the user's tensors are made, and none of ours.

The meta device stands for an accelerator: of what is made there nothing can be read.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.test_offload import BEHIND, OFF, Run, _same, adamw, stock

import zerograph
from zerograph.optim.clip import power_sum, power_sums
from zerograph.runtime.buffers import BufferPool
from zerograph.runtime.offload.nvme import Arena, huge_tensor
from zerograph.runtime.offload.saved import _memory
from zerograph.runtime.offload.store import mapped_tensor
from zerograph.runtime.testing.simulated_host import SimulatedHost

META = torch.device("meta")


def test_memory_of_the_host_is_there(tmp_path: Path) -> None:
    ones = [torch.ones(3), torch.ones(2)]
    with Arena([tmp_path], 2**20) as arena, META:
        made = {
            "gathered": BufferPool().take(8),
            "simulated": SimulatedHost().room(8),
            "empty": huge_tensor(0),
            "activations": _memory(8),
            "mapped": mapped_tensor(arena, arena.allocate(8), torch.float32, [0]),
            "sum": power_sum(ones, 2.0),
            "sums": power_sums(ones, 2.0),
        }
    assert {name: tensor.device.type for name, tensor in made.items()} == dict.fromkeys(made, "cpu")


def test_norms_are_taken() -> None:
    model = torch.nn.Linear(3, 2)
    expected = zerograph.norms(model).weight
    with META:
        assert zerograph.norms(model).weight == expected


def _trained(make: Any, mode: Any, options: dict[str, Any]) -> Any:
    training = Run(make, stage=3, **options)
    batches = [training.tokens() for _ in range(3)]
    clip = {"clip": 1.0} if make is adamw else {}
    with mode:
        for batch in batches:
            loss = training.compiled(batch)
            loss.backward()
            training.losses.append(loss.item())
            training.optimizer.step(**clip)
            training.optimizer.zero_grad()
    return training.result()


@pytest.mark.parametrize("make", [adamw, stock])
def test_states_on_nvme_are_updated(make: Any, tmp_path: Path) -> None:
    options = {**OFF, "path": str(tmp_path)}
    _same(_trained(make, META, options), _trained(make, nullcontext(), options))


def test_all_that_may_leave_a_device_returns(tmp_path: Path) -> None:
    options = {**BEHIND, "path": str(tmp_path), "offload": "parameters", "activations": "nvme"}
    _same(_trained(adamw, META, options), _trained(adamw, nullcontext(), options))
