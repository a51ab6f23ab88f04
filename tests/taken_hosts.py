"""Ranks of one host that take themselves for ranks of several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from zerograph.runtime.comm import connecting
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.connecting import connect
from zerograph.runtime.comm.rendezvous import Rendezvous

CPU = torch.device("cpu")


@contextlib.contextmanager
def on_hosts(host_of: Callable[[int], int] = lambda rank: rank // 2) -> Iterator[pytest.MonkeyPatch]:
    """Inside this rank takes itself for one on the host of that number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "this_host", lambda: f"host {host_of(dist.get_rank())}")
        yield patch


def opened() -> Communicator:
    assert dist.group.WORLD is not None
    return connect(dist.group.WORLD, CPU, Rendezvous.open(dist.group.WORLD, CPU))


def on_two_hosts() -> Communicator:
    with on_hosts():
        return opened()
