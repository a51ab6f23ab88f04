"""A step makes the host wait for nothing but the events of copies to its memory: no number is read, no copy blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.accelerator import here
from numerics import host_cases as cases
from numerics.test_offload import Run, adamw, stock
from ranks import run
from torch import nn

import zerograph


@contextlib.contextmanager
def _nothing_but(*allowed: str) -> Iterator[None]:
    """Fails where the host waits for something else; on a GPU torch notices all but events itself."""
    if here().type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    from fake_device import device

    library = device.load()
    library.forget_waits()
    yield
    assert library.waits().keys() <= {*allowed}


def _decided_there(model: nn.Module) -> torch.optim.Optimizer:
    """What may skip a step decides on the host, which then reads the norm."""
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=False)


def _steps(make: Callable[[nn.Module], Any], allowed: tuple[str, ...], clip: bool, options: dict[str, Any]) -> None:
    Run.device = here()
    training = Run(make, **{"stage": 3, **options})
    training.steps(2)
    more = {"clip": 1.0} if clip else {}
    training.compiled(training.tokens()).backward()
    training.optimizer.step(**more)
    training.optimizer.zero_grad()
    batches = [training.tokens() for _ in range(2)]
    torch.accelerator.synchronize()
    with _nothing_but(*allowed):
        for batch in batches:
            training.compiled(batch).backward()
            training.optimizer.step(**more)
            training.optimizer.zero_grad()


IN_MEMORY: dict[str, tuple[Callable[[nn.Module], Any], bool, dict[str, Any]]] = {
    "stage 1": (stock, False, {"stage": 1}),
    "stock": (stock, False, {}),
    "clipped": (adamw, True, {"dtype": torch.bfloat16}),
    "recomputed": (adamw, False, {"recompute": "full"}),
    "tiles": (adamw, False, {"tile": 2}),
    "parts of the batch": (adamw, False, {"batch_tiles": 3}),
}


@pytest.mark.parametrize("case", IN_MEMORY.values(), ids=IN_MEMORY.keys())
def test_a_step_in_memory_waits_for_nothing(case: tuple[Any, bool, dict[str, Any]]) -> None:
    make, clip, options = case
    run(1, _steps, make, (), clip, options)


def test_two_ranks_wait_for_nothing() -> None:
    run(2, _steps, adamw, (), True, {"dtype": torch.bfloat16})


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_offload_waits_for_events_only(tier: str, tmp_path: Path) -> None:
    Run.device = here()  # by which the options are chosen
    shards = cases.on_host() if tier == "host" else cases.on_disk(tmp_path)
    saved = {"activations": tier} | ({"path": str(tmp_path)} if tier == "nvme" else {})
    for options in (shards, saved):
        run(1, _steps, _decided_there, ("event",), False, options)
