"""Training where each host keeps gathered buckets in parts for the backward: the very losses of stage 3.

Tests ``planner/programs/host_parts.py`` as it runs. Hosts are those that ranks take for their own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from taken_hosts import on_hosts
from torch import Tensor, nn
from traced import compile_once

import zerograph
from zerograph.compiler import frame_plan
from zerograph.core.errors import RankError
from zerograph.core.machine import machine_named
from zerograph.core.plan import Plan
from zerograph.core.units import parse_bytes
from zerograph.dryrun.forecast import plan_file
from zerograph.planner.programs.rules import plan_step
from zerograph.runtime.comm.two_level import TwoLevelCommunicator

WORLD, WIDTH, STEPS = 4, 64, 5
ROOM = "950KiB"
"""For the parts that hosts keep, and not for all whole buckets."""


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
    compile_once(model, backend)
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
        if step == 3:  # gradients that are dropped, of parameters that then change
            with backend.no_sync():
                loss().backward()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
        with _counting() as calls:
            if step == 4:
                _as_in_a_pipeline(backend, loss)
            else:
                loss().backward()
        gathers.append(calls["start_gather"])
        assert not calls["trim"], "the backward gathers into the buffers of the forward"
        optimizer.step()
        optimizer.zero_grad()
    training = (bucket for bucket in backend.report().buckets if bucket.frame == 0)
    return losses, gathers, {bucket.residency for bucket in training}


def _as_in_a_pipeline(backend: zerograph.Backend, loss: Callable[[], Tensor]) -> None:
    """Two micro-batches, of which the second begins before the first has ended."""
    with backend._accumulation.one_schedule():
        first, second = loss(), loss()
        with backend.no_sync():
            first.backward()
        second.backward()


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


def _keeping(*given: Any, **options: Any) -> Plan:
    """The plan by rule, with parts of every bucket kept; a search also keeps some buckets whole."""
    plan = plan_step(*given, **options)
    return replace(plan, buckets=tuple(replace(bucket, residency="host") for bucket in plan.buckets))


def _both(**options: Any) -> None:
    with on_hosts():
        expected, twice, used = _trained(stage=3, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frame_plan, "plan_step", _keeping)
            losses, once, kept = _trained(stage=3, **options)
    assert (used, kept) == ({"use"}, {"host"})
    assert losses == expected and losses[-1] < losses[0]
    # A forward gathers 16 buckets, and a backward those 8 with weights. A second micro-batch finds all that came.
    assert (twice, once) == ([24, 24, 24, 24, 48], [16, 0, 16, 16, 16])


@pytest.mark.parametrize("wires", [{}, {"gather_wire": "int8", "reduce_wire": "int4"}], ids=["exact", "fewer bits"])
def test_losses_are_those_of_gathers_from_all_hosts(wires: dict[str, Any]) -> None:
    run(WORLD, partial(_both, **wires))


def _plans(folder: Path) -> None:
    """Write the plans of training over two hosts."""
    for name, options in ASKED.items():
        with on_hosts():
            model = Net()
            backend = zerograph.backend(compute="eager", bucket_size=2**16, prefetch=1, **options)
            model.compile(backend=backend)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            if dist.get_rank() == 0:
                (folder / name).write_text(backend.plan.to_json())


ASKED: dict[str, dict[str, Any]] = {
    "rule": {"stage": 3},
    "search": {"stage": "auto", "memory": ROOM, "recompute": 0.0},
}


def _made() -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), (torch.empty(8, WIDTH),)


def test_a_dry_run_makes_the_plan_of_training(tmp_path: Path) -> None:
    run(WORLD, partial(_plans, tmp_path))
    for name, options in ASKED.items():
        asked = {**options, "bucket_size": 2**16, "prefetch": 1}
        if "memory" in asked:
            asked["memory"] = parse_bytes(asked["memory"])
        planned = plan_file("tests", _made, machine_named("cpu"), world=WORLD, **asked).plan
        trained = Plan.from_json((tmp_path / name).read_text())
        assert (planned.hosts, planned.reductions) == (2, 3)
        assert planned == trained
    assert any(bucket.residency == "host" for bucket in planned.buckets)
