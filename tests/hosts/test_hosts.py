"""Ranks on two hosts, which are network namespaces of this machine: each shares memory within and a link between."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from exact import TWO_LEVELS
from host_ranks import LIMIT, PORT, Net, assert_mean, batch, run_on, torchrun, train, two_of_each
from ranks import refused
from torch.distributed.device_mesh import init_device_mesh
from traced import TracedOnce

import zerograph
from zerograph.compiler import frame_plan
from zerograph.core.errors import RankError, ZeroGraphError
from zerograph.core.machine import Machine
from zerograph.core.plan import Plan
from zerograph.measure import QUICK, measure
from zerograph.planner.programs.rules import plan_step

ROWS, STEPS, CUT_STEPS = 4, 3, 40
WINDOWS = 3
"""Of so many steps each, in which bytes are counted: the least counts, as ranks that wait for others send messages."""


def _sent() -> int:
    """Bytes that this rank's host has sent."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.split()[9])


class Way(NamedTuple):
    """A way to train between hosts, and what shows of it.

    Attributes:
        sent: bytes that a host sends in a step, to those of the parameters.
        transport: of the report.
        options: of the backend.
        replicas: in which each parameter is whole.
        keeps: by a plan that keeps parts of all parameters; a search has nothing to gain of so few layers.
    """

    sent: float
    transport: str
    options: dict[str, Any]
    replicas: int = 1
    keeps: bool = False


def _trained(ways: list[Way]) -> list[tuple[list[float], float, str]]:
    """By way losses, the bytes that the host sends in a step, to those of the parameters, and the transport."""
    found = []
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            if way.keeps:
                patch.setattr(frame_plan, "plan_step", _keeping)
            found.append(_trained_one(way.replicas, way.options))
    return found


def _keeping(*given: Any, **options: Any) -> Plan:
    plan = plan_step(*given, **options)
    return replace(plan, buckets=tuple(replace(bucket, residency="host") for bucket in plan.buckets))


def _trained_one(replicas: int, options: dict[str, Any]) -> tuple[list[float], float, str]:
    torch.manual_seed(0)
    world, model = dist.get_world_size(), Net()
    mesh = init_device_mesh("cpu", (replicas, world // replicas)) if replicas > 1 else None
    backend = zerograph.backend(mesh=mesh, compute="eager", **options)
    compiled = TracedOnce(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(compiled, optimizer, world * ROWS, range(1))  # which compiles
    sent = list[int]()
    for window in range(WINDOWS):
        dist.barrier()
        before = _sent()
        dist.barrier()  # nobody begins before all have looked
        losses += train(compiled, optimizer, world * ROWS, range(window * STEPS + 1, (window + 1) * STEPS + 1))
        dist.barrier()
        sent.append(_sent() - before)
    size = 4 * sum(p.numel() for p in model.parameters())
    return losses, min(sent) / STEPS / size, backend.report().transport


def _expected(world: int, steps: int = WINDOWS * STEPS + 1) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), world * ROWS, range(steps))


FEWER_BITS = {"stage": 3, "gather_wire": "int8", "reduce_wire": "int4"}
GLOO = "torch.distributed (gloo)"
TWO_HOSTS = {
    # In two levels half of the parameters go from each of two hosts in a gather, of which stage 3 has one more but for
    # the last layer, and in a reduction.
    "stage 3": Way(1.375, TWO_LEVELS, {"stage": 3}),
    "stage 2": Way(1.0, TWO_LEVELS, {"stage": 2}),
    "stage 0": Way(1.0, TWO_LEVELS, {"stage": 0}),
    # The all-reduce of a host's shards with those of one other.
    "replicas": Way(1.0, f"shared memory; between replicas {GLOO}", {"stage": 3}, replicas=2),
    # Half of the parameters in one gather, and half in a reduction.
    "parts kept": Way(1.0, TWO_LEVELS, {"stage": 3}, keeps=True),
    # Of four bytes a gather sends one and an int4 reduction a half, and a scale for each 256; biases are as they were.
    "fewer bits": Way(0.287, TWO_LEVELS, FEWER_BITS),
    "parts kept in fewer bits": Way(0.19, TWO_LEVELS, FEWER_BITS, keeps=True),
}
UNEVEN = {
    # Gathers through a ring of all ranks, two thirds of the parameters each, and as much for a reduction.
    "stage 3": Way(1.83, GLOO, {"stage": 3}),
}
THREE_HOSTS = {
    "stage 3": Way(1.83, GLOO, {"stage": 3}),
    "stage 0": Way(1.33, GLOO, {"stage": 0}),
    "fewer bits": Way(0.383, GLOO, FEWER_BITS),
}


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [((0, 0, 1, 1), TWO_HOSTS), ((0, 0, 1), UNEVEN), ((0, 1, 2), THREE_HOSTS)],
    ids=["two hosts", "uneven hosts", "three hosts"],
)
def test_losses_and_bytes_between_hosts(hosts: list[Any], ranks: tuple[int, ...], ways: dict[str, Way]) -> None:
    by_rank, expected = run_on([hosts[host] for host in ranks], _trained, list(ways.values())), _expected(len(ranks))
    for (name, way), found in zip(ways.items(), zip(*by_rank, strict=True), strict=True):
        exact = "reduce_wire" not in way.options
        assert_mean([losses for losses, *_ in found], expected, rtol=1e-6 if exact else 0.02)
        # Packets have headers, and ranks tell each other of programs and their ends.
        sent = pytest.approx([way.sent] * len(ranks), rel=0.02 if exact else 0.1)
        assert [sent for _, sent, _ in found] == sent, name
        assert {used for *_, used in found} == {way.transport}, name


def test_ranks_of_several_hosts_measure_the_link_between_them(hosts: list[Any], tmp_path: Path) -> None:
    file, runs = tmp_path / "machine.json", []
    for number, host in enumerate(hosts[:2]):
        job = f"--nnodes 2 --node-rank {number} --master-addr {hosts[0].address} --master-port {PORT}"
        bench = f"--nproc-per-node 2 --max-restarts 0 -m zerograph bench --quick -o {file} --path {tmp_path}"
        runs.append(torchrun(host, *job.split(), *bench.split()))
    told = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    machine = Machine.from_json(file.read_text())
    assert machine.ranks_per_node == 2 and "4 ranks on 2 hosts" in machine.notes
    # A link of 125 MB/s, of which a short burst passes at once.
    assert 60e6 < machine.inter.rate < 400e6 < machine.intra.rate


def _measures(folder: Path, address: str) -> str:
    """The error of a rank that measures as if torchrun had started it."""
    world = dist.get_world_size()
    dist.barrier()  # all have connected: one that goes would end the connecting of others
    dist.destroy_process_group()
    meets = {"WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(PORT + 1)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", **meets}
    return refused(measure, folder, None, QUICK)


def test_hosts_with_other_numbers_of_ranks_are_not_measured(hosts: list[Any], tmp_path: Path) -> None:
    errors = run_on([hosts[0], hosts[0], hosts[1]], _measures, tmp_path, hosts[0].address)
    assert all("3 ranks are not spread evenly over 2 hosts" in error for error in errors), errors


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


@pytest.mark.parametrize("seconds", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_link_that_comes_back_is_waited_for(hosts: list[Any], seconds: float) -> None:
    found = run_on(two_of_each(hosts), _cut, 2, seconds, limit=120)
    assert [rank.error for rank in found] == [""] * 4
    # Roundings grow in so many steps.
    assert_mean([rank.losses for rank in found], _expected(4, CUT_STEPS), rtol=1e-4)
    # TCP tries again after as long as it has waited so far.
    assert all(seconds < rank.seconds < 120 for rank in found)
