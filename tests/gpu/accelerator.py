"""The accelerator that tests run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numerics.test_offload import Run

import zerograph


def here() -> torch.device:
    """Its first device."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, 0)


def on_it(case: Callable[..., Any], *args: Any) -> Any:
    """The result of ``case``, whose trainings run there."""
    Run.device = here()
    return case(*args)


def backend(**options: Any) -> zerograph.Backend:
    """A backend that compiles, where there is a compiler for the accelerator."""
    own = {} if here().type == "cuda" else {"compute": "eager"}
    return zerograph.backend(**own, **options)
