"""Ranks on two hosts, which are network namespaces of this machine: each shares memory within and a link between.

`benchmarks/namespaces.py` makes them. It takes root and `iproute2`.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import TWO_LEVELS
from ranks import server
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerograph
from zerograph.core.errors import RankError, ZeroGraphError
from zerograph.core.machine import Machine

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
WIDTH, ROWS, STEPS = 256, 4, 3
PORT, LIMIT = 29_517, 20

Function = Callable[..., Any]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Three of them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    with importlib.import_module("namespaces").Hosts(3, "1gbit") as made:
        yield made


def two_of_each(hosts: list[Any]) -> list[Any]:
    """The hosts of four ranks."""
    return [hosts[0], hosts[0], hosts[1], hosts[1]]


def run_on(hosts: list[Any], function: Function, *args: Any) -> list[Any]:
    """Results of ``function(*args)`` by rank, None of one that was killed; ``hosts`` are those of the ranks."""
    pipes, processes = [], []
    for rank, host in enumerate(hosts):
        ours, theirs = server().Pipe()
        given = (theirs, host, hosts[0].address, rank, len(hosts), function, args)
        process = server().Process(target=_rank, args=given, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_result(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(pipe: Connection) -> Any:
    assert pipe.poll(120), "no answer"
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(pipe: Connection, host: Any, address: str, rank: int, world: int, function: Function, args: Any) -> None:
    host.enter()
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
    torch.set_num_threads(1)
    where, limit = f"tcp://{address}:{PORT}", timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=limit)
    pipe.send(function(*args))
    pipe.recv()  # rank 0 serves the store: it stays until all have answered


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.square().mean()


def batch(step: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def _sent() -> int:
    """Bytes that this rank's host has sent."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.split()[9])


def _trained(stage: int, replicas: int, **wires: Any) -> tuple[list[float], float, str]:
    """Losses, the bytes that the host sends in a step to those of the parameters, and the transport."""
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Net()
    mesh = init_device_mesh("cpu", (replicas, world // replicas)) if replicas > 1 else None
    backend = zerograph.backend(stage=stage, mesh=mesh, compute="eager", **wires)
    model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, before = list[float](), 0
    for step in range(STEPS + 1):
        if step == 1:  # the first one compiles
            dist.barrier()
            before = _sent()
            dist.barrier()  # nobody begins before all have looked
        loss = model(batch(step, world * ROWS)[rank * ROWS :][:ROWS])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    dist.barrier()
    size = 4 * sum(p.numel() for p in model.parameters())
    return losses, (_sent() - before) / STEPS / size, backend.report().transport


def _expected(world: int) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for step in range(STEPS + 1):
        loss = model(batch(step, world * ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


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
    mean = torch.tensor([losses for losses, *_ in found], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(_expected(len(ranks)), dtype=torch.float64), rtol=1e-6, atol=0)
    # Packets have headers, and ranks tell each other of programs and their ends.
    assert [sent for _, sent, _ in found] == pytest.approx([bytes_sent] * len(ranks), rel=0.02)
    assert {used for *_, used in found} == {transport}


@pytest.mark.parametrize(
    ("ranks", "bytes_sent"),
    # Of four bytes a gather sends one and an int4 reduction a half, and a scale for each 256; biases are as they were.
    [((0, 0, 1, 1), 0.287), ((0, 1, 2), 0.383)],
    ids=["two levels", "three hosts"],
)
def test_fewer_bits_between_hosts(hosts: list[Any], ranks: tuple[int, ...], bytes_sent: float) -> None:
    found = run_on([hosts[host] for host in ranks], _wired)
    mean = torch.tensor([losses for losses, *_ in found], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(_expected(len(ranks)), dtype=torch.float64), rtol=0.02, atol=0)
    assert [sent for _, sent, _ in found] == pytest.approx([bytes_sent] * len(ranks), rel=0.1)


def _wired() -> tuple[list[float], float, str]:
    return _trained(3, 1, gather_wire="int8", reduce_wire="int4")


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)], ids=["even", "uneven"])
def test_ranks_of_several_hosts_measure_the_link_between_them(
    hosts: list[Any], ranks: tuple[int, int], tmp_path: Path
) -> None:
    file, runs = tmp_path / "machine.json", []
    for number, (host, count) in enumerate(zip(hosts, ranks, strict=False)):
        job = f"--nnodes 2 --node-rank {number} --master-addr {hosts[0].address} --master-port {PORT}"
        torchrun = f"{sys.executable} -m torch.distributed.run {job} --nproc-per-node {count} --max-restarts 0"
        bench = f"hostname {host.name}; exec {torchrun} -m zerograph bench --quick -o {file} --path {tmp_path}"
        command = ["ip", "netns", "exec", host.name, "unshare", "--uts", "sh", "-c", bench]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
        runs.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
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

    def train(steps: int) -> None:
        for step in range(steps):
            model(batch(step, ROWS)).backward()

    train(1)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError) as caught:
        train(3)  # a program that had begun before may end
    return str(caught.value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_that_is_killed_on_one_host_ends_the_program_on_all(hosts: list[Any], replicas: int) -> None:
    *others, gone = run_on(two_of_each(hosts), _killed, replicas)
    assert gone is None
    assert all(f"rank 3 ({hosts[1].name})" in text for text in others), others


def _cut(seconds: float) -> tuple[str, float]:
    """The error of a rank, if any, when the link of rank 2's host is cut for so long, and how long it took."""
    torch.manual_seed(0)
    model = Net()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    model(batch(0, ROWS)).backward()
    began = time.monotonic()
    if dist.get_rank() == 2:
        link = ["ip", "link", "set", "eth0"]
        subprocess.run([*link, "down"], check=True)
        if seconds < LIMIT:
            time.sleep(seconds)
            subprocess.run([*link, "up"], check=True)
    try:
        for step in range(3):
            model(batch(step, ROWS)).backward()
    except ZeroGraphError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def test_a_link_that_is_cut_for_good_ends_the_program_on_both_sides(hosts: list[Any]) -> None:
    for text, seconds in run_on(two_of_each(hosts), _cut, LIMIT):
        assert text and seconds < 3 * LIMIT, text


def test_a_link_that_comes_back_is_waited_for(hosts: list[Any]) -> None:
    found = run_on(two_of_each(hosts), _cut, 3.0)
    assert [text for text, _ in found] == [""] * 4
    assert all(3 < seconds < LIMIT for _, seconds in found)
