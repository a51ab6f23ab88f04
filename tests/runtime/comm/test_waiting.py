"""How long a rank waits for others: several participants in one process, in threads, are the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.runtime.comm.rendezvous import Rendezvous
from zerograph.runtime.comm.waiting import BegunWait, WaitedPlace


def each(path: Path, *actions: Callable[[Rendezvous], None], timeout: float) -> list[Exception | None]:
    """What every rank's action raises."""
    found: list[Exception | None] = [None] * len(actions)
    participants = [
        Rendezvous(dist.FileStore(str(path / "store"), len(actions)), "test", rank, len(actions), timeout)
        for rank in range(len(actions))
    ]

    def act(rank: int) -> None:
        participants[rank].notice_after, participants[rank].beat_every = 0.1, 0.2
        try:
            actions[rank](participants[rank])
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


PROGRAM_3 = WaitedPlace(0, 3, "", "in the forward")


@pytest.mark.parametrize(
    ("other", "in_vain"),
    [
        (WaitedPlace(1, 2, "plan", "for a plan"), True),  # it comes to the program only afterwards
        (WaitedPlace(1, 3, "plan", "for a plan"), False),  # it has been in the program
        (WaitedPlace(1, 2, "", "in another program"), False),  # it may be slower
        (WaitedPlace(1, 3, "", "in another program"), False),  # which was compared when it began
    ],
)
def test_who_waits_in_vain(other: WaitedPlace, in_vain: bool) -> None:
    assert PROGRAM_3.deadlocks_with(other) is other.deadlocks_with(PROGRAM_3) is in_vain
    plan = WaitedPlace(0, 0, "plan", "for a plan")
    assert plan.deadlocks_with(WaitedPlace(1, 5, "budget", "for a budget"))
    assert not plan.deadlocks_with(WaitedPlace(1, 5, "plan", "for a plan"))


def waits(what: str, rank: int) -> Callable[[Rendezvous], None]:
    return lambda rendezvous: rendezvous.wait({rank: f"{what}/{rank}"}, f"for rank {rank} to tell {what}", what)


def runs(rendezvous: Rendezvous) -> None:
    rendezvous.programs += 1
    with BegunWait(rendezvous, "in the forward", lambda: [1]) as wait:
        while True:
            wait.look()
            time.sleep(0.05)


@pytest.mark.parametrize("other", [waits("a plan", 1), runs], ids=["asks for something else", "runs"])
def test_ranks_at_different_places_are_reported_at_once(tmp_path: Path, other: Callable[[Rendezvous], None]) -> None:
    start = time.monotonic()
    errors = each(tmp_path, other, waits("a budget", 0), timeout=60.0)
    assert time.monotonic() - start < 20
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert str(errors[0]) == str(errors[1])
    for doing in ("rank 1 waits for rank 0 to tell a budget", "rank 0 waits"):
        assert doing in str(errors[0])


def test_a_wait_that_ended_well_is_no_place(tmp_path: Path) -> None:
    def late(rendezvous: Rendezvous) -> None:
        time.sleep(1)
        rendezvous.store.set("a plan/0", "")
        waits("a budget", 1)(rendezvous)

    def soon(rendezvous: Rendezvous) -> None:
        waits("a plan", 0)(rendezvous)
        time.sleep(1)
        rendezvous.store.set("a budget/1", "")

    assert each(tmp_path, late, soon, timeout=20.0) == [None, None]


def test_a_rank_that_compiles_is_waited_for(tmp_path: Path) -> None:
    def compiles(rendezvous: Rendezvous) -> None:
        with rendezvous.compiling("forward"):
            time.sleep(2.5)
            rendezvous.store.set("a plan/0", "")

    assert each(tmp_path, compiles, waits("a plan", 0), timeout=1.0) == [None, None]


def test_one_that_itself_waits_does_not_count_as_compiling(tmp_path: Path) -> None:
    def compiles(rendezvous: Rendezvous) -> None:
        with rendezvous.compiling("forward"):
            waits("a plan", 2)(rendezvous)

    start = time.monotonic()
    errors = each(tmp_path, compiles, waits("a plan", 0), lambda _: time.sleep(3), timeout=1.5)
    assert time.monotonic() - start < 15
    for error in errors[:2]:
        assert isinstance(error, RankError) and ("did not come" in str(error) or "failed" in str(error))
