"""Ranks on two hosts, which are network namespaces of this machine: each shares memory within and a link between."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from exact import TWO_LEVELS
from host_ranks import LIMIT, PORT, Net, assert_mean, batch, run_on, torchrun, train, two_of_each
from torch.distributed.device_mesh import init_device_mesh

import zerograph
from zerograph.compiler import frame_plan
from zerograph.core.errors import RankError, ZeroGraphError
from zerograph.core.machine import Machine
from zerograph.core.plan import Plan
from zerograph.planner import plan_step

ROWS, STEPS, CUT_STEPS = 4, 3, 40
WINDOWS = 3
"""Of so many steps each, in which bytes are counted: the least counts, as ranks that wait for others send messages."""


def _sent() -> int:
    """Bytes that this rank's host has sent."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.split()[9])


def _trained(stage: int, replicas: int, **wires: Any) -> tuple[list[float], float, str]:
    """Losses, the bytes that the host sends in a step, to those of the parameters, and the transport."""
    torch.manual_seed(0)
    world, model = dist.get_world_size(), Net()
    mesh = init_device_mesh("cpu", (replicas, world // replicas)) if replicas > 1 else None
    backend = zerograph.backend(stage=stage, mesh=mesh, compute="eager", **wires)
    model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer, world * ROWS, range(1))  # which compiles
    sent = list[int]()
    for window in range(WINDOWS):
        dist.barrier()
        before = _sent()
        dist.barrier()  # nobody begins before all have looked
        losses += train(model, optimizer, world * ROWS, range(window * STEPS + 1, (window + 1) * STEPS + 1))
        dist.barrier()
        sent.append(_sent() - before)
    size = 4 * sum(p.numel() for p in model.parameters())
    return losses, min(sent) / STEPS / size, backend.report().transport


def _expected(world: int, steps: int = WINDOWS * STEPS + 1) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), world * ROWS, range(steps))


@pytest.mark.parametrize(
    ("ranks", "stage", "replicas", "bytes_sent", "transport"),
    [
        # In bytes of the parameters. In two levels half of these go from each of two hosts in a gather, of which
        # stage 3 has one more but for the last layer, and in a reduction.
        ((0, 0, 1, 1), 3, 1, 1.375, TWO_LEVELS),
        ((0, 0, 1, 1), 2, 1, 1.0, TWO_LEVELS),
        ((0, 0, 1, 1), 0, 1, 1.0, TWO_LEVELS),
        # The all-reduce of a host's shards with those of one other.
        ((0, 0, 1, 1), 3, 2, 1.0, "shared memory; between replicas torch.distributed (gloo)"),
        # Gathers through a ring of all ranks, two thirds of the parameters each, and as much for a reduction.
        ((0, 0, 1), 3, 1, 1.83, "torch.distributed (gloo)"),
        ((0, 1, 2), 3, 1, 1.83, "torch.distributed (gloo)"),
        ((0, 1, 2), 0, 1, 1.33, "torch.distributed (gloo)"),
    ],
    ids=["two levels", "stage 2", "stage 0", "replicas", "uneven hosts", "three hosts", "three hosts, stage 0"],
)
def test_losses_and_bytes_between_hosts(
    hosts: list[Any], ranks: tuple[int, ...], stage: int, replicas: int, bytes_sent: float, transport: str
) -> None:
    found = run_on([hosts[host] for host in ranks], _trained, stage, replicas)
    assert_mean([losses for losses, *_ in found], _expected(len(ranks)))
    # Packets have headers, and ranks tell each other of programs and their ends.
    assert [sent for _, sent, _ in found] == pytest.approx([bytes_sent] * len(ranks), rel=0.02)
    assert {used for *_, used in found} == {transport}


def test_hosts_keep_what_came_from_others_for_the_backward(hosts: list[Any]) -> None:
    found = run_on([hosts[host] for host in (0, 0, 1, 1)], _kept_parts)
    assert_mean([losses for losses, *_ in found], _expected(4))
    # Half of the parameters in one gather, and half in a reduction.
    assert [sent for _, sent, _ in found] == pytest.approx([1.0] * 4, rel=0.02)


def _kept_parts(**wires: Any) -> tuple[list[float], float, str]:
    """By a plan that keeps all: a search has nothing to gain of so few layers."""

    def keeping(*given: Any, **options: Any) -> Plan:
        plan = plan_step(*given, **options)
        return replace(plan, buckets=tuple(replace(bucket, residency="host") for bucket in plan.buckets))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_plan, "plan_step", keeping)
        return _trained(3, 1, **wires)


_AT_STAGE_3 = partial(_trained, 3, 1)


@pytest.mark.parametrize(
    ("ranks", "bytes_sent", "trained"),
    # Of four bytes a gather sends one and an int4 reduction a half, and a scale for each 256; biases are as they were.
    [((0, 0, 1, 1), 0.287, _AT_STAGE_3), ((0, 0, 1, 1), 0.19, _kept_parts), ((0, 1, 2), 0.383, _AT_STAGE_3)],
    ids=["two levels", "parts kept", "three hosts"],
)
def test_fewer_bits_between_hosts(
    hosts: list[Any], ranks: tuple[int, ...], bytes_sent: float, trained: Callable[..., Any]
) -> None:
    found = run_on([hosts[host] for host in ranks], partial(trained, gather_wire="int8", reduce_wire="int4"))
    assert_mean([losses for losses, *_ in found], _expected(len(ranks)), rtol=0.02)
    assert [sent for _, sent, _ in found] == pytest.approx([bytes_sent] * len(ranks), rel=0.1)


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)], ids=["even", "uneven"])
def test_ranks_of_several_hosts_measure_the_link_between_them(
    hosts: list[Any], ranks: tuple[int, int], tmp_path: Path
) -> None:
    file, runs = tmp_path / "machine.json", []
    for number, (host, count) in enumerate(zip(hosts, ranks, strict=False)):
        job = f"--nnodes 2 --node-rank {number} --master-addr {hosts[0].address} --master-port {PORT}"
        bench = f"--nproc-per-node {count} --max-restarts 0 -m zerograph bench --quick -o {file} --path {tmp_path}"
        runs.append(torchrun(host, *job.split(), *bench.split()))
    told = [run.communicate(timeout=240)[1] for run in runs]
    if ranks == (2, 2):
        assert [run.returncode for run in runs] == [0, 0], told
        machine = Machine.from_json(file.read_text())
        assert machine.ranks_per_node == 2 and "4 ranks on 2 hosts" in machine.notes
        # A link of 125 MB/s, of which a short burst passes at once.
        assert 60e6 < machine.inter.rate < 400e6 < machine.intra.rate
    else:
        assert all(run.returncode for run in runs) and not file.exists()
        assert "3 ranks are not spread evenly over 2 hosts" in "".join(told)


def _killed(replicas: int) -> str:
    """Rank 3 goes in its second step; the text of the error on the others."""
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2)) if replicas > 1 else None
    model.compile(backend=zerograph.backend(stage=3, mesh=mesh, compute="eager"))

    def go(steps: int) -> None:
        for step in range(steps):
            model(batch(step, ROWS)).backward()

    go(1)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError) as caught:
        go(3)  # a program that had begun before may end
    return str(caught.value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_that_is_killed_on_one_host_ends_the_program_on_all(hosts: list[Any], replicas: int) -> None:
    *others, gone = run_on(two_of_each(hosts), _killed, replicas)
    assert gone is None
    assert all(f"rank 3 ({hosts[1].name})" in text for text in others), others


class Cut(NamedTuple):
    """A rank of two hosts, between which the link was cut in its training."""

    error: str  # if any
    losses: list[float]
    seconds: float


def _cut(rank: int, seconds: float) -> Cut:
    """The link of ``rank``'s host is cut for so long."""
    torch.manual_seed(0)
    model = Net()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, error = train(model, optimizer, 4 * ROWS, range(1)), ""
    began = time.monotonic()
    if dist.get_rank() == rank:
        threading.Thread(target=_cut_link, args=(seconds,), daemon=True).start()
    try:
        losses += train(model, optimizer, 4 * ROWS, range(1, CUT_STEPS))
    except ZeroGraphError as raised:
        error = str(raised)
    return Cut(error, losses, time.monotonic() - began)


def _cut_link(seconds: float) -> None:
    time.sleep(0.1)  # anywhere in a step
    link = ["ip", "link", "set", "eth0"]
    subprocess.run([*link, "down"], check=True)
    if seconds < math.inf:
        time.sleep(seconds)
        subprocess.run([*link, "up"], check=True)


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_link_that_is_cut_for_good_ends_the_program_on_both_sides(hosts: list[Any], rank: int) -> None:
    """Rank 0 serves the store, through which ranks tell each other of failures."""
    for found in run_on(two_of_each(hosts), _cut, rank, math.inf):
        assert found.error and found.seconds < 3 * LIMIT, found


@pytest.mark.parametrize("seconds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_link_that_comes_back_is_waited_for(hosts: list[Any], seconds: float) -> None:
    found = run_on(two_of_each(hosts), _cut, 2, seconds, limit=120)
    assert [rank.error for rank in found] == [""] * 4
    # Roundings grow in so many steps.
    assert_mean([rank.losses for rank in found], _expected(4, CUT_STEPS), rtol=1e-4)
    # TCP tries again after as long as it has waited so far.
    assert all(seconds < rank.seconds < 120 for rank in found)
