"""Ranks say who is to blame: one that failed, or one whose process is gone, whoever saw that first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.runtime.comm.ending import Ending
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.comm.roster import Process, Roster

HOSTS = Roster([Process("a", 11), Process("a", 12), Process("b", 13), Process("b", 14)])


def test_ranks_are_named_with_their_hosts() -> None:
    assert HOSTS.named([3]) == "rank 3 (b)" and HOSTS.named([0, 2]) == "ranks 0 (a), 2 (b)"
    assert Roster().named([3]) == Roster([Process("a", 1)] * 4).named([3]) == "rank 3"
    assert HOSTS.where([3]) == "look at the output of rank 3 (b); `py-spy dump --pid 14` on b shows where rank 3 is"
    assert Roster().where([3]) == "look at the output of rank 3"


@pytest.mark.parametrize(
    ("why", "texts"),
    [
        (Ending(2, "error", "ValueError: boom"), "rank 0 cannot go on here: rank 2 (b) failed: ValueError: boom"),
        (Ending(2, "process", gone=(3,)), "rank 0 cannot go on here: rank 3 (b) ended; reports"),
        (
            Ending(2, "connection", "closed by peer", gone=(3,)),
            "rank 0 cannot go on here: lost rank 3 (b): a connection of rank 2 (b) closed (closed by peer), and rank 3 "
            "(b) did not answer for 5 s; reports",
        ),
        (
            Ending(2, "connection", "closed by peer"),
            "rank 0 cannot go on here: a connection of rank 2 (b) closed (closed by peer), and all ranks still answer",
        ),
        (Ending(2, "difference", "ranks differ", "a hint"), "ranks differ"),
    ],
)
def test_what_is_raised(why: Ending, texts: str) -> None:
    error = Ending.from_json(why.to_json()).error("rank 0 cannot go on here", HOSTS, "reports")
    assert str(error).partition("\n\n")[0] == texts and error.hint
    assert isinstance(error, CollectiveMismatch if why.kind == "difference" else RankError)


def test_ranks_that_answer_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees a connection close, rank 1 hears of it, and rank 2 is gone, or looks as well."""
    monkeypatch.setattr("zerograph.runtime.comm.peers.ROLL_CALL", 1.5)
    for everybody in (False, True):
        file = str(tmp_path / f"store{everybody}")
        ranks = [Rendezvous(dist.FileStore(file, 3), "test", rank, 3, 20.0) for rank in range(3)]
        errors: dict[int, str] = {}

        def see(rank: int, ranks: list[Rendezvous] = ranks, errors: dict[int, str] = errors) -> None:
            if rank == 0:
                errors[0] = str(ranks[0].disconnected("here", "closed by peer"))
                return
            while rank not in errors:
                try:
                    ranks[rank].check("there")
                except RankError as error:
                    errors[rank] = str(error)

        threads = [threading.Thread(target=see, args=(rank,)) for rank in range(3 if everybody else 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for rank, text in errors.items():
            assert text.startswith(f"rank {rank} cannot go on {'there' if rank else 'here'}: ")
            lost = "and all ranks still answer" if everybody else "lost rank 2: a connection of rank 0 closed"
            assert lost in text, text


KILLED = """
import os, signal, sys, torch, torch.distributed as dist
from zerograph.core.errors import RankError
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.connecting import connect
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.rendezvous import Rendezvous
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
cpu = torch.device("cpu")
comm = connect(dist.group.WORLD, cpu, Rendezvous.open(dist.group.WORLD, cpu))
for step in range(3):
    if (step, rank) == (2, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with together(comm, Entry("program", 1, 0)):
            pass
    except RankError as error:
        print(str(error), flush=True)
        break
os._exit(0)
"""


@pytest.mark.costly
@pytest.mark.parametrize("transport", ["auto", "group"])
def test_a_killed_rank_is_named_and_nobody_else(tmp_path: Path, transport: str) -> None:
    environment = os.environ | {"ZEROGRAPH_TRANSPORT": transport, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, text=True, stdout=subprocess.PIPE
        )
        for rank in range(3)
    ]
    texts = [process.communicate(timeout=90)[0] for process in processes]
    assert processes[2].returncode == -9
    for rank in range(2):
        assert texts[rank].startswith(f"rank {rank} cannot go on "), texts[rank]
        first = texts[rank].partition("\n")[0]
        assert ("lost rank 2: a connection of rank" if transport == "group" else "rank 2 ended") in first
        assert "failed" not in first
