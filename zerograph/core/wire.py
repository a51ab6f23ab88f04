"""Formats that matrices travel between ranks in, where they are not those that they are computed in. No torch.

Of "fp8" (e4m3), "int8" and "int4" each block of 256 elements has a scale, by which its largest one is the largest of
the format: ZeRO++ (arXiv:2306.10209) sends weights and gradients so. "bf16" has none. These lose digits; nothing is
sent so unless it is asked for. There is one more, "sign", that only :class:`zerograph.optim.OneBitAdam` sends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from zerograph.core.step import ITEM_SIZE, WIRE_BITS, Param

GatherWire = Literal["bf16", "fp8", "int8"]
ReduceWire = Literal["bf16", "int8", "int4"]
GATHER_WIRES, REDUCE_WIRES = get_args(GatherWire), get_args(ReduceWire)
_SHORTENED = ("float32", "bfloat16", "float16")


class Wires(NamedTuple):
    """What gathers and reductions send matrices as; None sends what is computed."""

    gather: GatherWire | None = None
    reduce: ReduceWire | None = None

    def of(self, param: Param) -> Param:
        """``param`` with the formats that it travels in.

        Only matrices are worth it: vectors (norms, biases) are few bytes, and lose most.
        """
        if len(param.shape) < 2 or param.dtype not in _SHORTENED:
            return param
        gathers = param.gather and param.home.ranks > 1  # one rank copies at most
        gathered = self.gather if gathers and _shortens(self.gather, param.compute_dtype) else None
        reduced = self.reduce if _shortens(self.reduce, param.reduce_dtype) else None
        return replace(param, gather_wire=gathered, reduce_wire=reduced)


def _shortens(wire: str | None, dtype: str) -> bool:
    return wire is not None and dtype in _SHORTENED and WIRE_BITS[wire] < 8 * ITEM_SIZE[dtype]
