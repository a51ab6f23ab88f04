"""Ranks on hosts that are network namespaces of this machine (`tests/hosts/conftest.py`), and what they train."""

from __future__ import annotations

import ctypes
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import server
from torch import Tensor, nn

WIDTH = 256
PORT, LIMIT = 29_517, 20

Function = Callable[..., Any]


def run_on(hosts: list[Any], function: Function, *args: Any, limit: float = LIMIT) -> list[Any]:
    """Results of ``function(*args)`` by rank, None of one that was killed.

    Args:
        hosts: those of the ranks.
        limit: seconds that a rank waits for others.
    """
    pipes, processes = [], []
    for rank, host in enumerate(hosts):
        ours, theirs = server().Pipe()
        given = (theirs, host, hosts[0].address, rank, len(hosts), limit, function, args)
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
        for process in processes:
            process.join(60)
            assert not process.is_alive(), "a rank that was killed has not ended"


def _result(pipe: Connection) -> Any:
    assert pipe.poll(240), "no answer"
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(
    pipe: Connection, host: Any, address: str, rank: int, world: int, limit: float, function: Function, args: Any
) -> None:
    host.enter()
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
    torch.set_num_threads(1)
    where = f"tcp://{address}:{PORT}"
    dist.init_process_group("gloo", where, timedelta(seconds=limit), rank=rank, world_size=world)
    pipe.send(function(*args))
    pipe.recv()  # rank 0 serves the store: it stays until all have answered


def two_of_each(hosts: list[Any]) -> list[Any]:
    """The hosts of four ranks."""
    return [hosts[0], hosts[0], hosts[1], hosts[1]]


def torchrun(host: Any, *arguments: str) -> subprocess.Popen[str]:
    """``torchrun`` with these arguments on a host, under the host's name."""
    start = f"hostname {host.name}; exec {sys.executable} -m torch.distributed.run {shlex.join(arguments)}"
    # Ranks that start again have a store of their own: in the agents' one gloo finds addresses of those that are gone.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = ["ip", "netns", "exec", host.name, "unshare", "--uts", "sh", "-c", start]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def own_disk(folder: Path) -> Path:
    """Where this thread, and those that it starts, see from now on the disk of their host in the fixture's ``folder``.

    The path is the same on all hosts, and the host's shared memory is on its disk, too.
    """
    disk, place = folder / socket.gethostname(), folder / "disk"
    for made in (place, disk / "shm"):
        made.mkdir(exist_ok=True)
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
    for mount in (["--make-rprivate", "/"], ["--bind", disk / "shm", "/dev/shm"], ["--bind", disk, place]):
        subprocess.run(["mount", *mount], check=True)
    return place


def taken(disk: Path, shared_memory: Path) -> int:
    """Bytes of the files on a disk, which may have no name, but for those in memory that ranks share."""
    room = os.statvfs(disk)
    shared = sum(512 * path.stat().st_blocks for path in shared_memory.iterdir())
    return (room.f_blocks - room.f_bfree) * room.f_frsize - shared


def assert_left_nothing(hosts: list[Any], disks: Path) -> None:
    """The disks of these hosts are empty, of files without a name, too."""
    for host in hosts:
        disk = disks / host.name
        assert list(disk.iterdir()) == [disk / "shm"] and taken(disk, disk / "shm") == 0


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


def train(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, rows: int, steps: Iterable[int]
) -> list[float]:
    """Losses of this rank, which takes its part of the batch of so many rows; all of it, without ranks."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses = list[float]()
    for step in steps:
        loss = model(batch(step, rows).chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_mean(found: list[list[float]], expected: list[float], rtol: float = 1e-6) -> None:
    """The mean over ranks of their losses is ``expected``, up to roundings."""
    mean = torch.tensor(found, dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0)
