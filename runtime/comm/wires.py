"""Gathers and reductions that send matrices in fewer bits (:mod:`zerograph.core.wire`), over any transport.

A gather sends bytes, which every rank decodes, those of its own shard too: all compute with the same parameters. Of a
reduction each rank sends every other one the part of the gradient that this sums, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import zerograph._core as _core
from zerograph.core.layout import Layout
from zerograph.core.step import WIRE_BITS, WIRE_BLOCK, Param
from zerograph.runtime.buffers import aligned, allocate_full, torch_dtype
from zerograph.runtime.comm.own_stream import Wait
from zerograph.runtime.comm.packing import padded_shards

if TYPE_CHECKING:
    from zerograph.runtime.comm.collectives import Communicator

_KERNELS = {"fp8": _core.Wire.fp8, "int8": _core.Wire.int8, "int4": _core.Wire.int4}
_MOST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
_SMALLEST = torch.finfo(torch.float32).tiny


def encode(wire: str, values: Tensor, out: Tensor) -> None:
    """Write each row of ``values`` as ``wire`` sends it.

    Args:
        values: ``[rows, elements]`` of float32, bfloat16 or float16, each row contiguous.
        out: ``[rows, wire_bytes(wire, elements)]`` bytes, likewise, each row at a multiple of 4.
    """
    if WIRE_BITS[wire] == 16:
        out.view(torch.bfloat16).copy_(values)
    elif values.device.type == "cpu":
        dtype = getattr(_core.DType, str(values.dtype).removeprefix("torch."))
        for row, room in zip(values, out, strict=True):
            _core.encode(_KERNELS[wire], row.data_ptr(), dtype, row.numel(), room.data_ptr())
    else:
        encode_by_torch(wire, values, out)


def decode(wire: str, message: Tensor, out: Tensor) -> None:
    """Write the elements of each row of ``message`` into a row of ``out``, in the dtype of that; shapes as for
    :func:`encode`."""
    if WIRE_BITS[wire] == 16:
        out.copy_(message.view(torch.bfloat16))
    elif out.device.type == "cpu":
        dtype = getattr(_core.DType, str(out.dtype).removeprefix("torch."))
        for row, room in zip(message, out, strict=True):
            _core.decode(_KERNELS[wire], row.data_ptr(), room.numel(), room.data_ptr(), dtype)
    else:
        decode_by_torch(wire, message, out)


def encode_by_torch(wire: str, values: Tensor, out: Tensor) -> None:
    """:func:`encode` of less than 16 bits with torch's operators, on any device: the same bits."""
    rows, elements = values.shape
    blocks = pad(values.float(), (0, -elements % WIRE_BLOCK)).view(rows, -1, WIRE_BLOCK)
    scales = (blocks.abs().amax(2, keepdim=True) / _MOST[wire]).clamp(min=_SMALLEST)
    scaled = (blocks / scales).nan_to_num(0.0).view(rows, -1)
    if wire == "fp8":
        payload = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        payload = scaled.round().to(torch.int8).view(torch.uint8)
        if wire == "int4":
            halves = (payload + 8).view(rows, -1, 2)
            payload = halves[..., 0] | (halves[..., 1] << 4)
    bytes_of, at = _extent(wire, elements)
    out[:, :bytes_of] = payload[:, :bytes_of]
    out[:, bytes_of:at] = 0
    out[:, at:].view(torch.float32).copy_(scales.squeeze(2))


def decode_by_torch(wire: str, message: Tensor, out: Tensor) -> None:
    """:func:`decode` likewise."""
    rows, elements = out.shape
    bytes_of, at = _extent(wire, elements)
    payload, scales = message[:, :bytes_of].contiguous(), message[:, at:].view(torch.float32)
    if wire == "fp8":
        values = payload.view(torch.float8_e4m3fn).float()
    elif wire == "int8":
        values = payload.view(torch.int8).float()
    else:
        values = torch.stack([payload & 15, payload >> 4], dim=2).view(rows, -1)[:, :elements].float() - 8
    blocks = pad(values, (0, -elements % WIRE_BLOCK)).view(rows, -1, WIRE_BLOCK)
    out.copy_((blocks * scales.unsqueeze(2)).view(rows, -1)[:, :elements])


def _extent(wire: str, elements: int) -> tuple[int, int]:
    """Bytes of the elements of a row, and where its scales begin."""
    size = -(-elements * WIRE_BITS[wire] // 8)
    return size, -(-size // 4) * 4


@dataclass(slots=True, eq=False)
class _Coded:
    """A gather under way: ``coded`` are the places of what comes in fewer bits."""

    params: Sequence[Param]
    coded: list[int]
    pending: Any


def start_gather(
    comm: Communicator, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
) -> Any:
    """``comm.start_gather`` of parameters that may have a wire of their own; :func:`finish_gather` takes the result.

    What is encoded waits for ``behind`` where it is computed: the transport would have waited beside that.
    """
    coded = [i for i, p in enumerate(params) if p.gather_wire is not None]
    if not coded:
        return comm.start_gather(params, shards, behind)
    for wait in behind:
        wait()
    sent, sends = list(params), list(shards)
    for i in coded:
        (values,) = padded_shards([params[i]], [shards[i]], shards[i].device)
        sends[i] = torch.empty(params[i].sent_bytes, dtype=torch.uint8, device=values.device)
        encode(params[i].gather_wire or "", values.unsqueeze(0), sends[i].unsqueeze(0))
        sent[i] = _as_bytes(params[i])
    return _Coded(params, coded, comm.start_gather(sent, sends))


def _as_bytes(param: Param) -> Param:
    """The messages of all ranks about ``param``."""
    ranks = param.home.ranks
    return Param(param.name, (ranks * param.sent_bytes,), "uint8", "uint8", "uint8", False, Layout("rows", ranks))


def finish_gather(comm: Communicator, pending: Any) -> list[Tensor]:
    """The full parameters, in compute dtype, contiguous."""
    if not isinstance(pending, _Coded):
        return comm.finish_gather(pending)
    found = comm.finish_gather(pending.pending)
    params = [pending.params[i] for i in pending.coded]
    full = allocate_full(params, found[pending.coded[0]].device)
    for i, param, room, tensor in zip(pending.coded, params, full.padded, full.tensors, strict=True):
        ranks = param.home.ranks
        decode(param.gather_wire or "", found[i].view(ranks, -1), room.view(ranks, -1))
        found[i] = tensor
    return found


class Terms:
    """Messages about gradients: for each receiver a row with its part of each, in the format that is sent."""

    def __init__(self, params: Sequence[Param], receivers: int, device: torch.device) -> None:
        self.params = params
        self.rooms = [aligned(p.term_bytes) for p in params]
        self.messages = torch.empty(receivers, sum(self.rooms), dtype=torch.uint8, device=device)

    def room_of(self, messages: Tensor, which: int) -> Tensor:
        """What a message, or each of some, has of one gradient: elements, or bytes of a wire."""
        param, at = self.params[which], sum(self.rooms[:which])
        room = messages[..., at : at + param.term_bytes]
        return room if param.reduce_wire is not None else room.view(torch_dtype(param.reduce_dtype))

    def encode(self, which: int, parts: Tensor) -> None:
        """Write the parts of one gradient that is sent in fewer bits, ``[receivers, elements]``, into the messages."""
        encode(self.params[which].reduce_wire or "", parts, self.room_of(self.messages, which))

    def sums(self, messages: Sequence[Tensor], rank: int) -> list[Tensor]:
        """The sum of each gradient's part of ``rank`` over the senders of ``messages``, in their order, in the dtype
        of the parameter: float32 (float64 for float64) until then."""
        return [self._sum([self._term(message, k) for message in messages], k, rank) for k in range(len(self.params))]

    def _term(self, message: Tensor, which: int) -> Tensor:
        param, term = self.params[which], self.room_of(message, which)
        if param.reduce_wire is None:
            return term
        values = term.new_empty(1, param.summed_elements, dtype=torch.float32)
        decode(param.reduce_wire, term.unsqueeze(0), values)
        return values[0]

    def _sum(self, terms: Sequence[Tensor], which: int, rank: int) -> Tensor:
        param = self.params[which]
        first, *others = (term[: elements_of(param, rank)] for term in terms)
        total = first.to(torch.float64 if param.reduce_dtype == "float64" else torch.float32)
        for term in others:
            total.add_(term)
        return total.to(torch_dtype(param.dtype), copy=True)  # else all of the message lives as long


def elements_of(param: Param, rank: int) -> int:
    """Elements of the gradient of ``param`` that ``rank`` sums."""
    return min(max(param.elements - rank * param.summed_elements, 0), param.summed_elements)


def spread(comm: Communicator, params: Sequence[Param], means: Sequence[Tensor], rank: int) -> list[Tensor]:
    """The gradients of ``params`` as ``rank`` keeps them, of its ``means``: those of unsharded ones are gathered."""
    found = list(means)
    unsharded = [i for i, p in enumerate(params) if not p.sharded]
    if unsharded:
        # As rows of one element, of which each rank has the mean of some.
        rows = Layout("rows", comm.world_size)
        whole = [params[i] for i in unsharded]
        flat = [
            replace(p, shape=(p.elements,), compute_dtype=p.dtype, home=rows, gather_wire=p.reduce_wire) for p in whole
        ]
        gathered = finish_gather(comm, start_gather(comm, flat, [means[i] for i in unsharded]))
        for i, mean in zip(unsharded, gathered, strict=True):
            found[i] = mean
    return [mean.view(p.shard_shape(rank)) for p, mean in zip(params, found, strict=True)]
