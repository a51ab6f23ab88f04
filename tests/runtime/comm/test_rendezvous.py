"""What a rank knows of the others, through a store alone: several participants in one process are the ranks.

``runtime/comm/peers.py`` is tested here too.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerograph.core.errors import RankError
from zerograph.runtime.comm.rendezvous import Rendezvous, timeout_of
from zerograph.runtime.comm.store_client import StoreLost


def ranks(path: Path, world_size: int = 2, timeout: float = 20.0) -> list[Rendezvous]:
    """Each with a connection of its own."""
    file = str(path / "store")
    return [
        Rendezvous(dist.FileStore(file, world_size), "test", rank, world_size, timeout) for rank in range(world_size)
    ]


def meet(participants: list[Rendezvous]) -> None:
    threads = [threading.Thread(target=rendezvous.meet) for rendezvous in participants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_errors_leave_no_keys_behind(tmp_path: Path) -> None:
    participants, store = ranks(tmp_path), dist.FileStore(str(tmp_path / "store"), 2)
    counts = []
    for generation in range(4):
        for rank, rendezvous in enumerate(participants):
            rendezvous.store.set(f"{generation}/entered/{rank}", "a program")
            rendezvous.fail(f"ValueError: boom on {rank}")
        with pytest.raises(RankError, match="rank 0 failed: ValueError: boom on 0"):
            participants[1].check("in a test")
        meet(participants)
        assert [(m.generation, m.failed) for m in participants] == [(generation + 1, False)] * 2
        counts.append(store.num_keys())
    assert counts == counts[:1] * 4


def test_void_keys_are_gone_when_ranks_have_met(tmp_path: Path) -> None:
    participants = ranks(tmp_path)
    for rank, rendezvous in enumerate(participants):
        rendezvous.store.set(f"sent/{rank}", "")
        rendezvous.fail("boom")
    participants[0].void.append("sent/0")
    meet(participants)
    assert [participants[1].store.has(f"sent/{rank}") for rank in range(2)] == [False, True]
    assert not participants[0].void


def test_of_many_ranks_the_missing_ones_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rendezvous, *others = ranks(tmp_path, 6, timeout=0.6)
    rendezvous.notice_after = 0.1
    others[4].report("works on something else")
    for rank in (0, 1, 3):
        rendezvous.store.set(f"came/{rank}", "")
    with caplog.at_level(logging.WARNING, "zerograph"), pytest.raises(RankError) as caught:
        rendezvous.wait({rank: f"came/{rank}" for rank in range(6)}, "for a test")
    assert "waited 1 s for a test, and ranks 2, 4, 5 did not come" in str(caught.value)
    assert "works on something else" in str(caught.value)
    assert [record.getMessage().count("for ranks 2, 4, 5,") for record in caplog.records] == [1]


def test_a_rank_that_left_is_seen_behind_one_that_is_slow(tmp_path: Path) -> None:
    participants = ranks(tmp_path, 3)
    participants.pop()
    gc.collect()
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 2 ended"):
        participants[0].wait({rank: f"came/{rank}" for rank in (1, 2)}, "for a test")
    assert time.monotonic() - start < 10


def test_a_forked_child_does_not_leave_for_its_parent(tmp_path: Path) -> None:
    participants = ranks(tmp_path)
    stores = [rendezvous.store for rendezvous in participants]  # the child's end would take the file along
    child = os.fork()
    if child == 0:
        del participants
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not participants[0].store.has("left/1")
    participants.pop()
    assert stores[0].has("left/1")


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def test_a_store_that_ended_is_named(caplog: pytest.LogCaptureFixture) -> None:
    context = get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    assert here.poll(60)
    store = dist.TCPStore("127.0.0.1", here.recv(), 2, is_master=False, timeout=timedelta(seconds=20))
    rendezvous = Rendezvous(store, "test", 1, 2, 20.0)
    rendezvous.check("in a test")
    server.kill()
    server.join()
    for wait in (
        lambda: rendezvous.check("in a test"),
        lambda: rendezvous.wait({0: "came/0"}, "for a test"),
        rendezvous.meet,
    ):
        with pytest.raises(StoreLost, match="the store of the process group does not answer rank 1"):
            wait()
    assert "does not answer" in rendezvous.reports([0])
    with caplog.at_level(logging.WARNING, "zerograph"):
        rendezvous.fail("ValueError: boom")  # and whatever is raised is raised
    assert "rank 1 cannot tell the others that it failed" in caplog.text


class _WithoutOptions:
    """A backend that does not say its options, as torch's base class."""

    @property
    def options(self) -> None:
        raise RuntimeError("Backend ucc does not implement getBackendOptions, please implement in your subclass.")

    def _get_backend(self, device: torch.device) -> _WithoutOptions:
        return self

    get_backend = _get_backend  # its public name, from torch 2.14 on


def test_a_backend_without_options_waits_as_long_as_torch_does_by_default() -> None:
    group = _WithoutOptions()
    assert timeout_of(group, torch.device("cpu")) == dist.constants.default_pg_timeout.total_seconds()  # type: ignore[arg-type]
