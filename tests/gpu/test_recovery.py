"""Ranks of an accelerator go on after an error only where all have launched the same collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from gpu.accelerator import here
from ranks import refused, run
from torch import Tensor

from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.runtime.comm.collectives import GroupCommunicator, together
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.rendezvous import Rendezvous

ROWS = 4
PARAMS = [
    Param(f"summed in {dtype}", (ROWS, 3), "float32", "float32", dtype, True, Layout("rows", 2))
    for dtype in ("float32", "bfloat16")
]
"""Gradients of two dtypes travel in two messages."""


def _gather(comm: GroupCommunicator, params: Sequence[Param], fails: bool) -> list[Tensor]:
    """With ``fails``, the shard of the last one is too large for its message, as memory could be too small for that."""
    shards = [torch.ones(ROWS // 2, 3, device=here()) for _ in params]
    if fails:
        shards[-1] = torch.ones(ROWS, 3, device=here())
    return comm.finish_gather(comm.start_gather(params, shards))


def _reduce(comm: GroupCommunicator, params: Sequence[Param], fails: bool) -> list[Tensor]:
    """Likewise, of the last gradient."""
    grads = [torch.ones(ROWS, 3, device=here()) for _ in params]
    if fails:
        grads[-1] = torch.ones(2 * ROWS, 3, device=here())
    return comm.finish_reduce(comm.start_reduce(params, grads))


Collective = Callable[[GroupCommunicator, Sequence[Param], bool], list[Tensor]]


def _program(comm: GroupCommunicator, collective: Collective, params: Sequence[Param], fails: bool) -> None:
    with together(comm, Entry("program", 1, 0)):
        collective(comm, params, fails)
        raise torch.OutOfMemoryError("in the next segment")


def _fail(collective: Collective, params: Sequence[Param], differ: bool) -> str:
    """The error of the next program on each rank; empty if it runs. Rank 0 fails as it makes a message. Rank 1 fails
    there too, or, if they ``differ``, in the segment behind it."""
    assert dist.group.WORLD is not None
    comm = GroupCommunicator(dist.group.WORLD, here(), Rendezvous.open(dist.group.WORLD, here()))
    fails = dist.get_rank() == 0 or not differ
    with pytest.raises(RuntimeError):
        _program(comm, collective, params, fails)
    text = ""
    if differ:
        text = refused(comm.enter, Entry("the next program", 2, 0))
        if fails:  # the other rank's device waits for it
            collective(comm, params[-1:], False)
    else:
        with together(comm, Entry("the next program", 2, 0)):
            assert all(tensor.eq(1).all() for tensor in collective(comm, params, False))
    torch.accelerator.synchronize()
    return text


CASES: dict[str, tuple[Collective, list[Param]]] = {
    "gather": (_gather, PARAMS[:1]),
    "reduction": (_reduce, PARAMS[:1]),
    "second message of a reduction": (_reduce, PARAMS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_that_differ_by_a_collective_do_not_go_on(case: tuple[Collective, list[Param]]) -> None:
    _skip_ranks_of_one_gpu()
    texts = [text.partition("\n\n")[0] for text in run(2, _fail, *case, True)]
    launched = len(case[1]) - 1
    counts = "; ".join(f"rank {r}: {launched + r} collectives begun, 0 optimizer steps taken" for r in range(2))
    assert set(texts) == {f"RankError: ranks failed at different places and cannot go on together ({counts})"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_that_fail_at_one_place_go_on(case: tuple[Collective, list[Param]]) -> None:
    _skip_ranks_of_one_gpu()
    run(2, _fail, *case, False)


def _skip_ranks_of_one_gpu() -> None:
    if here().type == "cuda":
        pytest.skip("ranks that share a GPU have gloo, whose connections begin anew after an error")
