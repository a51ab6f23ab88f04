"""The accelerator that tests run on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Inside of it the fake device is traced; the list gets the races that were there. A GPU is not watched."""
    if here().type != "fake":
        yield []
        return
    from fake_device import races

    with races.watched() as found:
        yield found
