"""Averages over ranks of tensors that travel as signs, with error feedback (Tang et al., 2021, arXiv:2102.02888).

Each rank sends every other one the signs of the part that this averages, and the mean magnitude of each block of 256
elements; the averages go back to all in the same format. A rank keeps the difference between a tensor and its signs,
and adds it the next time: so errors do not add up over steps. All ranks get the same averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.runtime.comm.collectives import of_all_ranks
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.wires import Terms, decode, elements_of, parts_of


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """The difference between a tensor that this rank averages and what was sent of it.

    Attributes:
        sent: of this rank's own tensor, whole, float32.
        averaged: of the part that this rank averages, flat, float32: :func:`elements_of` has its length.
    """

    sent: Tensor
    averaged: Tensor


def sent_as_signs(name: str, shape: Sequence[int], ranks: int) -> Param:
    """A tensor that each of ``ranks`` has, as :func:`average` takes it."""
    single = "float32"
    return Param(name, tuple(shape), single, single, single, True, Layout("whole", ranks), reduce_wire="sign")


def no_errors(param: Param, rank: int, device: torch.device) -> Errors:
    """Those before the first average."""
    averaged = torch.zeros(elements_of(param, rank), device=device)
    return Errors(torch.zeros(param.shape, device=device), averaged)


def anywhere(comm: Communicator, flag: Tensor) -> bool:
    """Whether ``flag``, a 0-d bool, holds on some rank; all call this inside of one program."""
    return bool(of_all_ranks(comm, "a flag of each rank", flag.to(torch.uint8)).any())


def average(
    comm: Communicator, params: Sequence[Param], values: Iterable[Tensor], errors: Sequence[Errors]
) -> Iterator[Tensor]:
    """The averages of ``values`` over ranks, who all call this inside of one program, and bring ``errors`` up to date.

    Args:
        params: :func:`sent_as_signs` makes them; the same on all ranks.
        values: of this rank, float32, of the shapes of ``params``, with finite elements.
        errors: of each, changed in place.

    Yields:
        The average of each, float32, in turn.
    """
    terms, device = Terms(params), errors[0].sent.device
    messages = terms.messages(comm.world_size, device)
    for which, (param, value, error) in enumerate(zip(params, values, errors, strict=True)):
        parts = parts_of(value + error.sent, comm.world_size, param.summed_elements)
        lost = _write(terms, messages, which, parts)
        error.sent.copy_(lost.view(-1)[: param.elements].view(param.shape))
    sizes = [[terms.bytes] * comm.world_size] * comm.world_size
    received = torch.stack(comm.finish_exchange(comm.start_exchange(list(messages), sizes)))
    reply = terms.messages(1, device)
    means = terms.sums(received, comm.rank, 1 / comm.world_size)
    for which, (param, mean, error) in enumerate(zip(params, means, errors, strict=True)):
        lost = _write(terms, reply, which, parts_of(mean + error.averaged, 1, param.summed_elements))
        error.averaged.copy_(lost[0, : mean.numel()])
    yield from _decoded(terms, of_all_ranks(comm, "averages as signs", reply[0]))


def _write(terms: Terms, messages: Tensor, which: int, parts: Tensor) -> Tensor:
    """Write ``parts`` into the messages, a row into each; returns what they lose by it, in their own memory."""
    terms.write(messages, which, parts)
    came = torch.empty_like(parts)
    decode("sign", terms.room_of(messages, which), came)
    return parts.sub_(came)


def _decoded(terms: Terms, messages: Tensor) -> Iterator[Tensor]:
    for which, param in enumerate(terms.params):
        parts = torch.empty(len(messages), param.summed_elements, device=messages.device)
        decode("sign", terms.room_of(messages, which), parts)
        yield parts.view(-1)[: param.elements].view(param.shape)
