"""Dynamo's graphs read rows, not DTensors, wherever rows are all that they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy import Toy

import zerograph
from zerograph.compiler.shard_inputs import _Rows, take_local_shards
from zerograph.dryrun.compile_only import simulated_rank


class Checkpointed(Toy):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Introspective(Toy):
    """Also reads one parameter as the sharded one that it is."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.head._parameters["weight"].full_tensor().sum()


def _traced(model: nn.Module) -> tuple[list[Any], list[Any], Callable[..., Any]]:
    """The inputs of Dynamo's graph, what they are exchanged for, and the graph with that done before each call."""
    found: list[Any] = []

    def catch(gm: Any, inputs: Any) -> Any:
        traced, exchanging = take_local_shards(gm, inputs)
        found.extend((list(inputs), traced, exchanging(gm)))
        return gm

    zerograph.shard(model, zerograph.backend(stage=3))
    with pytest.raises(StopIteration):
        torch.compile(model, backend=lambda gm, inputs: (catch(gm, inputs), _stop)[1], fullgraph=True)(torch.arange(4))
    return tuple(found)  # type: ignore[return-value]


def _stop(*_: Any) -> None:
    raise StopIteration


@pytest.mark.parametrize("kind", [Toy, Checkpointed])
def test_every_parameter_is_exchanged(kind: type[nn.Module]) -> None:
    with simulated_rank(0, 2):
        model = kind()
        model.head.weight.requires_grad_(False)
        inputs, traced, _ = _traced(model)
    shards = [x for x in inputs if isinstance(x, DTensor)]
    assert len(shards) == len(list(model.parameters()))
    assert not any(isinstance(x, DTensor) for x in traced)
    for before, after in zip(inputs, traced, strict=True):
        if isinstance(before, DTensor):
            assert after.shape == before._local_tensor.shape
            assert after.requires_grad == before.requires_grad


def test_what_is_read_as_a_dtensor_stays_one() -> None:
    with simulated_rank(0, 2):
        inputs, traced, _ = _traced(Introspective())
    assert sum(isinstance(x, DTensor) for x in inputs) > 1
    assert sum(isinstance(x, DTensor) for x in traced) == 1


def test_what_nobody_reads_has_no_gradient() -> None:
    """Zeros would let an optimizer decay a parameter, and move it by its old momentum."""
    with simulated_rank(0, 2):
        model = Toy()
        zerograph.shard(model, zerograph.backend(stage=3))
        read, unread = list(model.parameters())[:2]
        rows, _ = _Rows.apply(read, unread)
        rows.sum().backward()
    assert read.grad is not None and unread.grad is None
