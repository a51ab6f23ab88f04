"""Private names of torch that dry runs need: there, and of use, on the installed torch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from zerograph.dryrun import torch_private


def test_what_needs_values() -> None:
    with torch_private.FakeTensorMode():
        x = torch.ones(2)
        assert type(x) is not torch.Tensor
        with pytest.raises(torch_private.NEEDS_VALUES):
            x.sum().item()


def _broken(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


def _raising(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")


def test_what_dynamo_cannot_trace() -> None:
    for function, breaks in ((_broken, True), (_raising, False)):
        with pytest.raises(get_args(torch_private.Untraced)) as caught:
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
        assert torch_private.breaks_graph(caught.value) is breaks
        assert caught.value.msg and caught.value.real_stack


def test_what_a_backend_raises() -> None:
    def backend(gm: object, inputs: object) -> object:
        raise ValueError("no")

    with pytest.raises(torch_private.BackendFailed):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def test_a_backend_ends_the_call() -> None:
    def backend(gm: object, inputs: object) -> object:
        raise torch_private.Ended

    with pytest.raises(torch_private.Ended):
        torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(torch.ones(2))


def test_simulated_ranks() -> None:
    torch_private.simulate_group(3, 4096)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4096)
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()
