"""Ranks agree on collectives, plans and models before any of them waits for another, and hear of what differs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plans import plan_file
from ranks import run

from zerograph.compiler.agreement import Agreement
from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.core.instructions import Compute, Gather
from zerograph.core.layout import Layout
from zerograph.core.plan import GivenPlan
from zerograph.core.program import Program
from zerograph.core.step import Param
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.runtime.comm.connecting import connect
from zerograph.runtime.comm.rendezvous import Rendezvous

CPU = torch.device("cpu")


def program(*names: str, kind: str = "forward") -> Program:
    params = [Param(name, (4,), "float32", "float32", "float32", True, Layout("rows", 2)) for name in names]
    gathers = [Gather(i, (p,), (i,), i + 10) for i, p in enumerate(params)]
    return Program(kind, 3, 20, (*gathers, Compute(0, (0,), (5,))), (), ())


class Lone(Agreement):
    """Of one of several ranks that are threads here: all it needs of a group is who it is."""

    def __init__(self, rank: int, world: int, path: Path, timeout: float) -> None:
        self.rank, self.world_size, self.peers = rank, world, range(world)
        self.rendezvous = Rendezvous(dist.FileStore(str(path / "store"), world), "test", rank, world, timeout)
        self._first = {}


def each(path: Path, *actions: Callable[[Agreement], Any], timeout: float = 20.0) -> list[Any]:
    """What each rank's action returns or raises."""
    found: list[Any] = [None] * len(actions)
    agreements = [Lone(rank, len(actions), path, timeout) for rank in range(len(actions))]

    def act(rank: int) -> None:
        try:
            found[rank] = actions[rank](agreements[rank])
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_programs_that_agree(tmp_path: Path) -> None:
    def both(agreement: Agreement) -> None:
        agreement.check("train", program("w", "v"))
        agreement.check("train", program("w", "v", kind="backward"))
        agreement.check("other", program("v"))

    assert each(tmp_path, both, both, both) == [None] * 3


def test_the_first_difference_is_named_on_every_rank(tmp_path: Path) -> None:
    programs = program("w", "v"), program("w", "u")
    for rank, error in enumerate(each(tmp_path, *(lambda a, p=p: a.check("train", p) for p in programs))):
        assert isinstance(error, CollectiveMismatch)
        message = str(error)
        assert message.startswith(
            f"train forward #0: rank {1 - rank} and rank {rank} would run different collectives (2 "
        )
        mine, theirs = ("v", "u") if rank == 0 else ("u", "v")
        assert f"rank {1 - rank} only: gather bucket 1: {theirs} [4] float32" in message
        assert f"rank {rank} only: gather bucket 1: {mine} [4] float32" in message
        assert "hint: every rank must use the same parameters in the same order" in message


def test_ranks_beside_are_told_and_not_compared(tmp_path: Path) -> None:
    """Of 2 x 2 ranks the odd ones have other parts: plans are gathered from all, programs compared among two."""

    def act(agreement: Agreement) -> list[Any]:
        agreement.peers = range(agreement.rank % 2, 4, 2)
        agreement.check("train", program("w", *["uneven"] * (agreement.rank % 2)))
        return agreement.gather("budget", agreement.rank)

    assert each(tmp_path, act, act, act, act) == [[0, 1, 2, 3]] * 4


def test_later_programs_of_a_frame_ask_nobody(tmp_path: Path) -> None:
    """Rank 0 alone compiles for another shape; in another order the collectives would not meet."""

    def first(agreement: Agreement) -> None:
        agreement.check("train", program("w", "v"))
        agreement.check("train", program("w", "v"))
        forward = program("w", "v")
        agreement.check("train", replace(forward, instructions=forward.instructions[::-1]))

    found = each(tmp_path, first, lambda agreement: agreement.check("train", program("w", "v")))
    assert found[1] is None
    assert "the first program of this frame and this one would run different collectives" in str(found[0])


def test_a_program_without_collectives_asks_nobody(tmp_path: Path) -> None:
    assert each(tmp_path, lambda a: a.check("train", program()), lambda a: None) == [None, None]


def test_a_rank_that_never_compiles_it_is_named(tmp_path: Path) -> None:
    error, _ = each(tmp_path, lambda a: a.check("train", program("w")), lambda a: None, timeout=0.3)
    assert isinstance(error, RankError)
    # Less than a second, on a machine that has time for it.
    found = re.search(r"rank 0 waited \d s for rank 1 to compile train forward #0, and rank 1 did not come", str(error))
    assert found, error
    assert "rank 1 last reported: nothing yet" in str(error)


def test_what_was_interrupted_is_exchanged_again(tmp_path: Path) -> None:
    """Under the same key: what a rank said in vain is void once ranks meet again."""
    lone = Lone(0, 2, tmp_path, 0.3)
    with pytest.raises(RankError):
        lone.check("train", program("w"))
    assert lone.rendezvous.void == ["agreement/train forward #0/0"]
    other = Lone(1, 2, tmp_path, 20.0)
    other.broadcast("train forward #0", list(program("w").collectives()))
    lone.rendezvous.void.clear()
    lone.check("train", program("w"))
    assert lone.rendezvous.void == []


def test_answers_come_by_rank(tmp_path: Path) -> None:
    found = each(tmp_path, *(lambda a, n=n: a.gather("memory", {"bytes": n}) for n in (3, 1, 2)))
    assert found == [[{"bytes": 3}, {"bytes": 1}, {"bytes": 2}]] * 3


def _same_models(which: str) -> str:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    agreement = Agreement.open(group, CPU)
    assert agreement is not None
    lines = {"same": ["a", "b"], "other": ["a", f"b{rank}"], "more": ["a", "b"][: 2 - rank]}[which]
    try:
        agreement.require_same(lines)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_models_that_differ_are_reported_alike_on_all_ranks() -> None:
    assert run(2, _same_models, "same") == ["", ""]
    for which, message in (
        ("other", "rank 0 has b0, rank 1 has b1"),
        ("more", "rank 0 has b, rank 1 has nothing more"),
    ):
        first, second = run(2, _same_models, which)
        assert first == second and message in first and "hint: build the same model on every rank" in first


def _replays(layers: list[int]) -> str:
    """Opens an agreement with a plan of so many layers; 0 for none."""
    group, mine = dist.group.WORLD, layers[dist.get_rank()]
    assert group is not None
    given = GivenPlan(f"{mine}.json", plan_file(mine).plan) if mine else None
    try:
        Agreement.open(group, CPU, given)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_all_ranks_replay_one_plan_or_none() -> None:
    assert run(2, _replays, [4, 4]) == run(2, _replays, [0, 0]) == ["", ""]
    for layers in ([4, 0], [4, 5]):
        first, second = run(2, _replays, layers)
        assert first == second and first.startswith("ranks replay different plans: rank 0 replays 4.json")
        assert ("rank 1 replays none" in first) is (layers[1] == 0)


def _failing() -> str:
    group = dist.group.WORLD
    assert group is not None
    agreement = Agreement.open(group, CPU)
    assert agreement is not None
    communicator = connect(group, CPU, agreement.rendezvous)
    try:
        with agreement.compiling("train", communicator):
            if dist.get_rank() == 1:
                raise ZeroDivisionError("in a pass")
            agreement.check("train", program("w"))
    except (ZeroDivisionError, RankError) as error:
        return str(error)
    return ""


def test_a_compilation_that_fails_is_heard_by_who_waits() -> None:
    first, second = run(2, _failing)
    assert "rank 1 failed: while compiling train: ZeroDivisionError: in a pass" in first
    assert second == "in a pass"


def test_simulated_ranks_agree_with_nobody() -> None:
    with simulated_rank(0, 4):
        assert dist.group.WORLD is not None
        assert Agreement.open(dist.group.WORLD, CPU) is None
