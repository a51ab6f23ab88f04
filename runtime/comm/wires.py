"""Gathers and reductions that send matrices in fewer bits (:mod:`zerograph.core.wire`), over any transport.

A gather sends bytes, which every rank decodes, those of its own shard too: all compute with the same parameters. Of a
reduction each rank sends every other one the part of the gradient that this sums, in float32.

Where matrices lie decides who encodes and decodes them: on a GPU with Triton its kernels (``kernels/wires.py``), on the
CPU the native ones, and on other devices, also a GPU without Triton, torch's operators. All write the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import zerograph._core as _core
from zerograph.core.layout import Layout
from zerograph.core.step import WIRE_BITS, WIRE_BLOCK, WIRE_MOST, Param
from zerograph.runtime import kernels
from zerograph.runtime.buffers import aligned, allocate_full, dtype_name, torch_dtype
from zerograph.runtime.comm.communicator import Communicator, HostGathers
from zerograph.runtime.comm.packing import padded_shards
from zerograph.runtime.own_stream import Wait

_KERNELS = {"fp8": _core.Wire.fp8, "int8": _core.Wire.int8, "int4": _core.Wire.int4, "sign": _core.Wire.sign}
_SMALLEST = torch.finfo(torch.float32).tiny


def encode(wire: str, values: Tensor, out: Tensor) -> None:
    """Write each row of ``values`` as ``wire`` sends it.

    Args:
        values: ``[rows, elements]`` of float32, bfloat16 or float16, each row contiguous.
        out: ``[rows, wire_bytes(wire, elements)]`` bytes, likewise, each row at a multiple of 4.
    """
    if WIRE_BITS[wire] == 16:
        out.view(torch.bfloat16).copy_(values)
    elif kernels.available(values.device):
        from zerograph.runtime.kernels import wires  # imports Triton

        wires.encode(wire, values, out)
    elif values.device.type == "cpu":
        dtype = getattr(_core.DType, dtype_name(values.dtype))
        for row, room in zip(values, out, strict=True):
            _core.encode(_KERNELS[wire], row.data_ptr(), dtype, row.numel(), room.data_ptr())
    else:
        encode_by_torch(wire, values, out)


def decode(wire: str, message: Tensor, out: Tensor) -> None:
    """Write the elements of each row of ``message`` into a row of ``out``, in the dtype of that; shapes as for
    :func:`encode`."""
    if WIRE_BITS[wire] == 16:
        out.copy_(message.view(torch.bfloat16))
    elif kernels.available(out.device):
        from zerograph.runtime.kernels import wires

        wires.decode(wire, message, out)
    elif out.device.type == "cpu":
        dtype = getattr(_core.DType, dtype_name(out.dtype))
        for row, room in zip(message, out, strict=True):
            _core.decode(_KERNELS[wire], row.data_ptr(), room.numel(), room.data_ptr(), dtype)
    else:
        decode_by_torch(wire, message, out)


def encode_by_torch(wire: str, values: Tensor, out: Tensor) -> None:
    """:func:`encode` of less than 16 bits with torch's operators, on any device: the same bits."""
    rows, elements = values.shape
    blocks = pad(values.float(), (0, -elements % WIRE_BLOCK)).view(rows, -1, WIRE_BLOCK)
    if wire == "sign":
        scales, scaled = _means(blocks, elements), blocks.view(rows, -1)
    else:
        scales = (blocks.abs().amax(2, keepdim=True) / WIRE_MOST[wire]).clamp(min=_SMALLEST)
        scaled = (blocks / scales).where(scales.isfinite(), 0.0).view(rows, -1)
    if wire == "sign":
        bits = (scaled >= 0).to(torch.uint8).view(rows, -1, 8)
        payload = (bits << torch.arange(8, dtype=torch.uint8, device=values.device)).sum(2).to(torch.uint8)
    elif wire == "fp8":
        payload = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        payload = scaled.round().to(torch.int8).view(torch.uint8)
        if wire == "int4":
            halves = (payload + 8).view(rows, -1, 2)
            payload = halves[..., 0] | (halves[..., 1] << 4)
    size, at = _size(wire, elements), out.shape[1] - 4 * scales.shape[1]
    out[:, :size] = payload[:, :size]
    out[:, size:at] = 0
    out[:, at:].view(torch.float32).copy_(scales.squeeze(2))


def _means(blocks: Tensor, elements: int) -> Tensor:
    """The mean magnitude of each block, of which the last one may have fewer elements; zeros follow these.

    Sums have the order of ``csrc/wire_target.cc``, and so the same bits: 16 lanes, and then halves of these.
    """
    rows, count, _ = blocks.shape
    lanes = blocks.abs().view(rows, count, -1, 16)
    sums = lanes[:, :, 0]
    for which in range(1, lanes.shape[2]):
        sums = sums + lanes[:, :, which]
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[..., :half] + sums[..., half:]
    counts = torch.full((count, 1), float(WIRE_BLOCK), device=blocks.device)
    counts[-1:] -= -elements % WIRE_BLOCK
    return sums / counts


def decode_by_torch(wire: str, message: Tensor, out: Tensor) -> None:
    """:func:`decode` likewise."""
    rows, elements = out.shape
    at = message.shape[1] - 4 * -(-elements // WIRE_BLOCK)
    payload, scales = message[:, : _size(wire, elements)].contiguous(), message[:, at:].view(torch.float32)
    if wire == "fp8":
        values = payload.view(torch.float8_e4m3fn).float()
    elif wire == "int8":
        values = payload.view(torch.int8).float()
    elif wire == "sign":
        bits = payload.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=out.device) & 1
        values = bits.view(rows, -1)[:, :elements].float() * 2 - 1
    else:
        values = torch.stack([payload & 15, payload >> 4], dim=2).view(rows, -1)[:, :elements].float() - 8
    blocks = pad(values, (0, -elements % WIRE_BLOCK)).view(rows, -1, WIRE_BLOCK)
    scales = scales + (scales - scales)  # infinity, the scale of a block with one, becomes NaN
    out.copy_((blocks * scales.unsqueeze(2)).view(rows, -1)[:, :elements])


def _size(wire: str, elements: int) -> int:
    """Bytes of so many elements without their scales, which begin at the next multiple of 4."""
    return -(-elements * WIRE_BITS[wire] // 8)


@dataclass(slots=True, eq=False)
class _Coded:
    """A gather under way of ``params``, of which some come in fewer bits."""

    params: Sequence[Param]
    pending: Any


def start_gather(
    comm: Communicator, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Wait] = ()
) -> Any:
    """``comm.start_gather`` of parameters that may have a wire of their own; :func:`finish_gather` takes the result.

    What is encoded waits for ``behind`` where it is computed: the transport would have waited beside that.
    """
    if all(p.gather_wire is None for p in params):
        return comm.start_gather(params, shards, behind)
    for wait in behind:
        wait()
    sent = [_encoded(p, shard) for p, shard in zip(params, shards, strict=True)]
    return _Coded(params, comm.start_gather([_as_sent(p) for p in params], sent))


def start_gather_inside(comm: HostGathers, params: Sequence[Param], parts: Sequence[Tensor]) -> Any:
    """:func:`start_gather` of what this host kept of them (:func:`host_parts`), which nothing else is read for."""
    if all(p.gather_wire is None for p in params):
        return comm.start_gather_inside(params, parts)
    return _Coded(params, comm.start_gather_inside([_as_sent(p) for p in params], parts))


def host_parts(comm: HostGathers, pending: Any) -> Sequence[Tensor]:
    """By parameter, the part of a finished gather that came to this rank from all hosts, as it is sent."""
    return comm.host_parts(pending.pending if isinstance(pending, _Coded) else pending)


def _encoded(param: Param, shard: Tensor) -> Tensor:
    """What this rank sends of ``param``."""
    if param.gather_wire is None:
        return shard
    (values,) = padded_shards([param], [shard], shard.device)
    message = torch.empty(param.sent_bytes, dtype=torch.uint8, device=values.device)
    encode(param.gather_wire, values.unsqueeze(0), message.unsqueeze(0))
    return message


def _as_sent(param: Param) -> Param:
    """What is gathered of ``param``: itself, or as bytes."""
    if param.gather_wire is None:
        return param
    size, ranks = param.home.ranks * param.sent_bytes, param.home.ranks
    return Param(param.name, (size,), "uint8", "uint8", "uint8", False, Layout("rows", ranks), experts=param.experts)


def finish_gather(comm: Communicator, pending: Any) -> list[Tensor]:
    """The full parameters, in compute dtype, contiguous."""
    if not isinstance(pending, _Coded):
        return comm.finish_gather(pending)
    found = comm.finish_gather(pending.pending)
    full = allocate_full(pending.params, found[0].device, comm.pool)
    for param, came, room, tensor in zip(pending.params, found, full.padded, full.tensors, strict=True):
        if param.gather_wire is None:
            tensor.copy_(came)  # in memory of all messages, which would live as long
        else:
            ranks = param.home.ranks
            decode(param.gather_wire, came.view(ranks, -1), room.view(ranks, -1))
    return full.tensors


class Terms:
    """Messages about gradients: bytes of each one's part, one behind the other, in the format that is sent."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = params
        ends = list(accumulate((aligned(p.term_bytes) for p in params), initial=0))
        self._begin, self.bytes = ends[:-1], ends[-1]

    def messages(self, receivers: int, device: torch.device) -> Tensor:
        """Memory for one to each receiver: ``[receivers, bytes]``."""
        return torch.empty(receivers, self.bytes, dtype=torch.uint8, device=device)

    def room_of(self, messages: Tensor, which: int) -> Tensor:
        """What messages, a row each, have of one gradient: elements, or bytes of a wire."""
        param, begin = self.params[which], self._begin[which]
        room = messages[:, begin : begin + param.term_bytes]
        return room if param.reduce_wire is not None else room.view(torch_dtype(param.reduce_dtype))

    def write(self, messages: Tensor, which: int, parts: Tensor) -> None:
        """Write the parts of one gradient, ``[receivers, elements]``, into the messages."""
        wire, room = self.params[which].reduce_wire, self.room_of(messages, which)
        room.copy_(parts) if wire is None else encode(wire, parts, room)

    def sums(self, messages: Tensor | Sequence[Tensor], rank: int, scale: float = 1.0) -> list[Tensor]:
        """The sum of each gradient's part of ``rank`` over the senders of ``messages``, in their order, times
        ``scale``, in the dtype of the parameter: float32 (float64 for float64) until then.

        Args:
            messages: by sender; on an accelerator rows of one tensor, of which a launch adds up all that a matrix has.
            rank: that has received them.
            scale: of the sums.
        """
        return [self._sum(messages, which, rank, scale) for which in range(len(self.params))]

    def _sum(self, messages: Tensor | Sequence[Tensor], which: int, rank: int, scale: float) -> Tensor:
        param = self.params[which]
        if param.reduce_wire is not None and isinstance(messages, Tensor) and kernels.available(messages.device):
            from zerograph.runtime.kernels import wires

            mean = messages.new_empty(elements_of(param, rank), dtype=torch_dtype(param.dtype))
            wires.add_up(param.reduce_wire, self.room_of(messages, which), param.summed_elements, mean, scale)
            return mean
        wide = torch.float64 if param.reduce_dtype == "float64" else torch.float32
        total: Tensor | None = None
        for message in messages:
            term = self._term(message, which)[: elements_of(param, rank)]
            total = term.to(wide) if total is None else total.add_(term)
        assert total is not None
        if scale != 1.0:
            total.mul_(scale)
        return total.to(torch_dtype(param.dtype), copy=True)  # else all of the message lives as long

    def _term(self, message: Tensor, which: int) -> Tensor:
        param, room = self.params[which], self.room_of(message.unsqueeze(0), which)
        if param.reduce_wire is None:
            return room[0]
        values = room.new_empty(1, param.summed_elements, dtype=torch.float32)
        decode(param.reduce_wire, room, values)
        return values[0]


def parts_of(value: Tensor, ranks: int, elements: int) -> Tensor:
    """The parts of ``value`` that each of ``ranks`` sums: ``[ranks, elements]``, with zeros at the end."""
    if value.numel() == ranks * elements:
        return value.contiguous().view(ranks, elements)
    parts = value.new_zeros(ranks * elements)
    parts[: value.numel()].copy_(value.reshape(-1))
    return parts.view(ranks, elements)


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
