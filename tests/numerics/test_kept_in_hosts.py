"""Training where each host keeps gathered buckets in parts for the backward: the very losses of stage 3.

Tests ``planner/programs/host_parts.py`` as it runs. Hosts are those that ranks take for their own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from taken_hosts import on_hosts
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import RankError
from zerograph.runtime.comm.two_level import TwoLevelCommunicator

WORLD, WIDTH, STEPS = 4, 64, 4
ROOM = "950KiB"
"""For all parts that hosts keep, and not for whole buckets."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _trained(**options: Any) -> tuple[list[float], list[int], set[str]]:
    """Losses, gathers between hosts in each step, and how long buckets stay."""
    torch.manual_seed(0)
    model = Net()
    backend = zerograph.backend(compute="eager", bucket_size=2**16, prefetch=1, **options)
    model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(dist.get_rank())
    losses, gathers = list[float](), list[int]()

    def loss() -> Tensor:
        value: Tensor = model(torch.randn(8, WIDTH, generator=batches)).square().mean()
        losses.append(float(value.detach()))
        return value

    for step in range(STEPS):
        if step == 1:  # gradients of two batches
            with backend.no_sync():
                loss().backward()
        if step == 2:
            _fail(loss())
            optimizer.zero_grad()
            with torch.no_grad():
                loss()
        with _counting() as calls:
            loss().backward()
        gathers.append(calls["start_gather"])
        assert not calls["trim"], "the backward gathers into the buffers of the forward"
        optimizer.step()
        optimizer.zero_grad()
    training = (bucket for bucket in backend.report().buckets if bucket.frame == 0)
    return losses, gathers, {bucket.residency for bucket in training}


def _fail(loss: Tensor) -> None:
    """In a backward on one rank, where the host's parts are gathered, and on the others too."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            for name in ("start_gather", "start_gather_inside"):
                patch.setattr(TwoLevelCommunicator, name, _raise)
        with pytest.raises((ValueError, RankError)):
            loss.backward()


def _raise(*_: Any) -> None:
    raise ValueError("on one rank")


@contextlib.contextmanager
def _counting() -> Iterator[Counter[str]]:
    """Gathers between hosts, and times that free buffers go."""
    calls = Counter[str]()

    def counted(name: str) -> Any:
        method = getattr(TwoLevelCommunicator, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return method(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_gather", "trim"):
            patch.setattr(TwoLevelCommunicator, name, counted(name))
        yield calls


def _both(**options: Any) -> None:
    with on_hosts():
        expected, twice, used = _trained(stage=3, **options)
        losses, once, kept = _trained(stage="auto", memory=ROOM, **options)
    assert used == {"use"} and "host" in kept and "backward" not in kept
    assert losses == expected and losses[-1] < losses[0]
    # A forward gathers 16 buckets, and a backward those 8 with weights.
    assert (twice, once) == ([24] * STEPS, [16] * STEPS)


@pytest.mark.parametrize("wires", [{}, {"gather_wire": "int8", "reduce_wire": "int4"}], ids=["exact", "fewer bits"])
def test_losses_are_those_of_gathers_from_all_hosts(wires: dict[str, Any]) -> None:
    run(WORLD, partial(_both, **wires))
