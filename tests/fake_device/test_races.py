"""No two streams use one block of memory without one waiting for the other, on error paths too.

These run with ``--device=fake`` (`make fake-test`). On a GPU ``TORCH_CUDA_SANITIZER=1`` looks for the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import races
from gpu.accelerator import here
from numerics import host_cases as cases
from numerics.test_offload import Run, _accumulates_and_evaluates, adamw
from ranks import run
from torch import nn

import zerograph
from zerograph.runtime.comm.collectives import GroupCommunicator
from zerograph.runtime.offload import host
from zerograph.runtime.own_stream import OwnStream

pytestmark = pytest.mark.skipif(
    getattr(torch.accelerator.current_accelerator(), "type", "") != "fake", reason="needs --device=fake"
)


def _options(name: str, folder: Path) -> dict[str, Any]:
    Run.device = here()
    options: dict[str, dict[str, Any]] = {
        "stage 1": {"stage": 1},
        "in memory": {},
        "recomputed": {"recompute": "full"},
        "tiles": {"tile": 2, "prefetch": 2},
        "states on the host": cases.on_host("optimizer"),
        "states on the host, updated on the device": {**cases.on_host("optimizer"), "update": "device"},
        "all on the host": cases.on_host(),
        "all on NVMe": cases.on_disk(folder),
        "activations on the host": {"activations": "host"},
        "all and activations on NVMe": {**cases.on_disk(folder), "activations": "nvme"},
    }
    return options[name]


NAMES = ["stage 1", "in memory", "recomputed", "tiles", "states on the host",
         "states on the host, updated on the device", "all on the host", "all on NVMe",
         "activations on the host", "all and activations on NVMe"]  # fmt: skip


def _trained(name: str, folder: Path) -> list[str]:
    with races.watched() as found:
        training = Run(adamw, **{"stage": 3, "dtype": torch.bfloat16, **_options(name, folder)})
        _accumulates_and_evaluates(training)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_training_has_none(name: str, tmp_path: Path) -> None:
    assert run(2, _trained, name, tmp_path) == [[], []]


def _beside(folder: Path, overlap: bool | str, dtype: torch.dtype | None) -> list[str]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return zerograph.optim.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=False, overlap=overlap)

    with races.watched() as found:
        Run(make, stage=3, dtype=dtype, **_options("all on NVMe", folder)).steps(4)
    return found


@pytest.mark.parametrize(("overlap", "dtype"), [(True, torch.bfloat16), (True, None), ("forward", torch.bfloat16)])
def test_updates_beside_programs_have_none(overlap: bool | str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    assert run(2, _beside, tmp_path, overlap, dtype) == [[], []]


def _fails(name: str, folder: Path, leave_out: Callable[[pytest.MonkeyPatch], None] | None = None) -> list[str]:
    """A forward ends in the middle, while gathers are under way, and training goes on."""
    training = Run(adamw, **{"stage": 3, "prefetch": 2, **_options(name, folder)})
    training.steps(2)
    calls = 0

    def ended(self: GroupCommunicator, pending: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("in the middle")
        return finish(self, pending)

    finish = GroupCommunicator.finish_gather
    with pytest.MonkeyPatch.context() as patch, races.watched() as found:
        patch.setattr(GroupCommunicator, "finish_gather", ended)
        if leave_out is not None:
            leave_out(patch)
        with pytest.raises(KeyError, match="in the middle"):
            training.backward()
        training.optimizer.zero_grad()
        training.steps(2)
    return found


@pytest.mark.parametrize("name", ["in memory", "all on the host", "all on NVMe"])
def test_errors_that_are_caught_leave_none(name: str, tmp_path: Path) -> None:
    assert run(2, _fails, name, tmp_path) == [[], []]


def _fails_at_its_start(name: str, folder: Path) -> list[str]:
    """A collective is under way, and whoever began it does not get to know."""
    training = Run(adamw, **{"stage": 3, "prefetch": 2, **_options(name, folder)})
    training.steps(2)
    end, calls = OwnStream.end, 0

    def ended(self: OwnStream) -> torch.Event:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("behind a collective")
        return end(self)

    with pytest.MonkeyPatch.context() as patch, races.watched() as found:
        patch.setattr(OwnStream, "end", ended)
        with pytest.raises(KeyError, match="behind a collective"):
            training.backward()
        training.optimizer.zero_grad()
        training.steps(2)
    return found


@pytest.mark.parametrize("name", ["in memory", "all on the host"])
def test_collectives_that_nobody_knows_of_leave_none(name: str, tmp_path: Path) -> None:
    assert run(2, _fails_at_its_start, name, tmp_path) == [[], []]


def _forgets_collectives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupCommunicator, "_land", lambda self: self._flying.clear())


def _waits_for_no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host._Copying, "wait", lambda self: setattr(self, "_pairs", ()))


FAULTS = {
    "memory of a collective that nobody waited for": ("in memory", _forgets_collectives, "the end of its life"),
    "a copy that nobody waited for": ("all on the host", _waits_for_no_copy, "copy"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_waits_that_are_left_out_are_found(fault: str, tmp_path: Path) -> None:
    name, leave_out, races_with = FAULTS[fault]
    found = run(2, _fails, name, tmp_path, leave_out)
    assert all(any(races_with in race for race in own) for own in found)
