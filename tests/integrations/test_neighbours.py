"""Connections between the stages of a pipeline, on ranks that send and receive as torch's schedules do.

Tests ``integrations/neighbours.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zerograph.core.errors import CollectiveMismatch, RankError
from zerograph.integrations.neighbours import Neighbours
from zerograph.integrations.torch_private import send_through
from zerograph.runtime.torch_private import gloo_group

LARGE = 1 << 20
"""Elements of a message that no buffer of the system takes: its send ends when the other rank receives."""


def _connected() -> Neighbours:
    assert dist.group.WORLD is not None
    return Neighbours(dist.group.WORLD, torch.device("cpu"))


def _operation(
    neighbours: Neighbours, verb: str, value: float = 0.0, size: int = LARGE
) -> tuple[torch.Tensor, dist.Work]:
    """As a schedule begins a transfer with the other rank, of a pair."""
    tensor, operation = torch.full((size,), value), dist.isend if verb == "send" else dist.irecv
    made = dist.P2POp(operation, tensor, 1 - dist.get_rank())
    made.group = neighbours
    assert made.group.group_name == dist.group.WORLD.group_name  # by which schedules of torch 2.14 sort transfers
    (work,) = dist.batch_isend_irecv([made])
    return tensor, work


def _one_fails(pending: str) -> list[float]:
    """Rank 0 fails with a transfer under way, which torch still knows; rank 1 waits for something else."""
    neighbours = _connected()
    neighbours.begin()
    tensor, work = _operation(neighbours, "send" if pending == "send" and dist.get_rank() == 0 else "recv")
    begun = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(0.3)
        neighbours.fail("ValueError: boom")
        with pytest.raises(RankError, match="rank 0 failed: ValueError: boom"):
            work.wait()  # it can never end
        with pytest.raises(RankError, match="rank 0 failed: ValueError: boom"):
            _operation(neighbours, "send")
    else:
        _, other = (tensor, work) if pending == "recv" else _operation(neighbours, "send", 2.0)
        with pytest.raises(RankError, match=r"pipeline over ranks 0, 1 of the job: rank 0 failed: ValueError: boom"):
            other.wait()
        neighbours.fail("as rank 0 did")
    assert time.monotonic() - begun < 10
    neighbours.begin()
    assert neighbours.rendezvous.generation == 1
    received, works = [], []
    for value in (3.0, 4.0):  # nothing of before comes in between
        verbs = ("send", "recv") if dist.get_rank() == 0 else ("recv", "send")
        found = [_operation(neighbours, verb, value) for verb in verbs]
        works += [work for _, work in found]
        received.append(found[verbs.index("recv")][0])
    assert all(work.wait() for work in works * 2)  # a second wait for what has ended returns too
    return [tensor.unique().item() for tensor in received]


@pytest.mark.parametrize("pending", ["send", "recv"])
def test_a_rank_that_fails_ends_waits_and_all_go_on(pending: str) -> None:
    assert run(2, _one_fails, pending, timeout=60) == [[3.0, 4.0]] * 2


def _stops() -> list[bool]:
    """Of a rank that is not to begin the next step: it, or one that waited for its norm, failed between steps."""
    neighbours, found = _connected(), list[bool]()
    neighbours.begin()
    number = torch.ones(1, dtype=torch.float64)
    neighbours.add_up(number)
    assert number.item() == 2.0
    if dist.get_rank() == 1:
        with pytest.raises(RankError, match="rank 0 failed: ValueError: no step"):
            neighbours.add_up(number)
    for _ in range(2):  # a second optimizer, in whose norm nobody is any more
        neighbours.stop("ValueError: no step")
        found.append(neighbours.stopped)
    neighbours.fail("this step is not begun")
    found.append(neighbours.stopped)
    neighbours.stop("behind a step of the pipeline that failed, all begin the next one")
    found.append(neighbours.stopped)
    neighbours.begin()
    neighbours.add_up(number)
    assert number.item() == 4.0
    return found


def test_a_rank_whose_optimizer_fails_ends_the_waits_of_others_and_drops_the_next_step() -> None:
    assert run(2, _stops, timeout=60) == [[True, True, False, False]] * 2


def _stops_unheard() -> bool:
    neighbours = _connected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "fail", lambda _: torch.ones(2).reshape(3))
        with pytest.raises(RuntimeError):
            neighbours.stop("ValueError: no step")
    return neighbours.stopped


def test_a_rank_that_cannot_tell_the_others_drops_the_next_step_too() -> None:
    assert run(2, _stops_unheard, timeout=60) == [True] * 2


def _connects(slow: int) -> float:
    def connect(*args: Any) -> dist.ProcessGroup:
        group = gloo_group(*args)
        time.sleep(0.5 * (dist.get_rank() == slow))
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerograph.integrations.neighbours.gloo_group", connect)
        dist.barrier()
        begun = time.monotonic()
        _connected()
    return time.monotonic() - begun


def test_a_rank_has_connected_when_all_have() -> None:
    assert min(run(2, _connects, 1, timeout=60)) > 0.4


def _told() -> str:
    """What a stage tells another of shapes, where a schedule has given these other ranks, beside a default device."""
    neighbours, rank = _connected(), dist.get_rank()
    neighbours.begin()
    stage = PipelineStage(nn.Linear(2, 2), rank, 2, torch.device("cpu"))
    stage.stage_index_to_group_rank = {0: 1, 1: 0}
    send_through(stage, neighbours)
    stage.stage_index_to_group_rank = {0: 0, 1: 1}
    told = "2 x 3"
    with torch.device("meta"):  # which keeps no numbers
        if rank == 0:
            stage._send_meta(told, 1)
        else:
            told = stage._recv_meta(0)
        neighbours.end(steps=0, trains=True, met=0)
    return told


def test_stages_tell_each_other_shapes() -> None:
    assert run(2, _told, timeout=60) == ["2 x 3"] * 2


def _ends() -> tuple[float, list[str]]:
    neighbours, rank, found = _connected(), dist.get_rank(), list[str]()
    unheld = _connected()
    unheld.begin()
    for steps in range(3):  # no optimizer holds what rank 0 has, and each step is one after an error
        unheld.end(steps=steps * rank, trains=True, met=steps)
    if rank == 0:
        unheld.takes_steps = True  # its first one failed
    with pytest.raises(CollectiveMismatch, match="of different ages"):
        unheld.end(steps=3 * rank, trains=True, met=3)
    neighbours.begin()
    begun = time.monotonic()
    time.sleep(0.5 * rank)
    neighbours.end(steps=0, trains=True, met=0)
    waited = time.monotonic() - begun
    neighbours.end(steps=rank, trains=True, met=0)  # only rank 1 has stepped: without an error stages may take turns
    neighbours.end(steps=rank, trains=rank == 0, met=1)  # none has stepped, after an error
    neighbours.end(steps=2 * rank, trains=rank == 1, met=2)  # after another one, and rank 0 has nothing to train
    for _ in range(2):
        with pytest.raises(CollectiveMismatch) as caught:  # rank 0 alone has stepped, and knows of an error
            neighbours.end(steps=2, trains=True, met=3 - rank)
        found.append(str(caught.value))
    neighbours.end(steps=2 + rank, trains=True, met=3)  # both have
    return waited, found


def test_a_step_ends_on_all_ranks_and_stages_of_different_ages_are_found() -> None:
    for rank, (waited, found) in enumerate(run(2, _ends, timeout=60)):
        assert rank == 1 or waited > 0.4
        assert all("1 ranks of the pipeline have taken an optimizer step that 1 have not" in text for text in found)
