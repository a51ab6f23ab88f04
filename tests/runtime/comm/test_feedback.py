"""Averages of signs over ranks: what arrives, what is left for the next time, over every transport."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run
from taken_hosts import on_two_hosts, opened
from torch import Tensor
from torch.nn.functional import pad

from zerograph.core.step import WIRE_BLOCK, Param
from zerograph.runtime.comm.collectives import LoneCommunicator, together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.feedback import Errors, anywhere, average, no_errors, sent_as_signs
from zerograph.runtime.comm.wires import elements_of

WORLD = 4
SHAPES = [(37, 50), (9,), (), (3, WIRE_BLOCK)]
CPU = torch.device("cpu")


def _signs(value: Tensor, param: Param) -> Tensor:
    """What arrives of ``value``: zeros pad the last part of a rank."""
    parts = pad(value.reshape(-1), (0, param.home.ranks * param.summed_elements - param.elements))
    blocks = [b for part in parts.split(param.summed_elements) for b in part.split(WIRE_BLOCK)]
    found = torch.cat([torch.where(b >= 0, 1.0, -1.0) * b.abs().mean() for b in blocks])
    return found[: param.elements].view(param.shape)


def _rounds(comm: Communicator, rounds: int = 3) -> None:
    params = [sent_as_signs(str(shape), shape, comm.world_size) for shape in SHAPES]
    errors = [no_errors(p, comm.rank, CPU) for p in params]
    sent = [[torch.zeros(p.shape) for p in params] for _ in range(comm.world_size)]
    averaged = [torch.zeros(p.shape) for p in params]
    torch.manual_seed(0)
    for _ in range(rounds):
        values = [[torch.randn(p.shape) for p in params] for _ in range(comm.world_size)]
        with together(comm, Entry("test", 1, 0)):
            found = list(average(comm, params, iter(values[comm.rank]), errors))
        for i, (param, got) in enumerate(zip(params, found, strict=True)):
            arrived = []
            for own, lost in zip(values, sent, strict=True):
                arrived.append(_signs(own[i] + lost[i], param))
                lost[i] = own[i] + lost[i] - arrived[-1]
            mean = torch.stack(arrived).mean(0) + averaged[i]
            expected = _signs(mean, param)
            averaged[i] = mean - expected
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
            torch.testing.assert_close(errors[i].sent, sent[comm.rank][i], rtol=0, atol=1e-6)
            begin = comm.rank * param.summed_elements
            part = averaged[i].view(-1)[begin:][: elements_of(param, comm.rank)]
            torch.testing.assert_close(errors[i].averaged, part, rtol=0, atol=1e-6)


def _on(transport: str) -> None:
    assert dist.group.WORLD is not None
    with pytest.MonkeyPatch.context() as patch:
        if transport == "group":
            patch.setenv("ZEROGRAPH_TRANSPORT", "group")
        comm = on_two_hosts() if transport == "two levels" else opened()
    _rounds(comm)
    with together(comm, Entry("test", 2, 0)):
        found = [anywhere(comm, torch.tensor(comm.rank == rank)) for rank in (0, WORLD - 1, WORLD)]
    assert found == [True, True, False]


@pytest.mark.parametrize("transport", ["two levels", "group", "shared memory"])
def test_ranks_get_the_average_of_signs_and_keep_the_rest(transport: str) -> None:
    run(WORLD, _on, transport)


def test_one_rank_has_signs_too() -> None:
    _rounds(LoneCommunicator())


def test_errors_do_not_add_up_over_steps() -> None:
    """The sum of all that arrives differs from that of all that was sent by the last errors."""
    torch.manual_seed(0)
    comm, param = LoneCommunicator(), sent_as_signs("x", (1000,), 1)
    errors = no_errors(param, 0, CPU)
    assert isinstance(errors, Errors)
    values = [torch.randn(1000) for _ in range(50)]
    arrived = [next(iter(average(comm, [param], [value], [errors]))) for value in values]
    rest = torch.stack(values).sum(0) - torch.stack(arrived).sum(0)
    torch.testing.assert_close(rest, errors.sent + errors.averaged, rtol=0, atol=1e-4)
    assert rest.abs().mean() < 0.2 * torch.stack(values).abs().sum(0).mean()
