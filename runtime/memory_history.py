"""A step's allocations on a device, as torch's allocator remembers them, for pytorch.org/memory_viz.

Torch knows the code that allocated something. A recording knows more: the instruction that ran meanwhile, and whose
tensors lie there in the end. Each becomes one more frame of the traceback, the innermost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerograph.core.errors import ConfigError
from zerograph.runtime.torch_private import allocations, allocator_history, forget_allocations, remember_allocations

Frame = dict[str, Any]
"""A line of a traceback, as torch's snapshots have it: "filename", "line" and "name"."""


class During(NamedTuple):
    """One instruction, or an optimizer's step, while which something was allocated.

    Attributes:
        begin, end: in nanoseconds since 1970.
        name: of the instruction, for people.
        program: its kind: "forward", "backward" or "update".
        number: of the instruction in it.
    """

    begin: int
    end: int
    name: str
    program: str
    number: int

    @property
    def frame(self) -> Frame:
        """It as a line of a traceback."""
        return {"filename": self.program, "line": self.number, "name": self.name}


class MemoryHistory:
    """The history of one device's allocations, kept from :meth:`begin` to :meth:`end`."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is kept yet.

        Raises:
            ConfigError: torch keeps no history of what ``device`` allocates.
        """
        memory = allocator_history(device)
        if memory is None:
            raise ConfigError(
                f"torch keeps no history of allocations on {device.type}, so that record(memory=True) has nothing to "
                "record",
                "record() without memory=True tells bytes over time; `zerograph show plan.json --memory-viz FILE` "
                "draws every tensor of a plan",
            )
        self._memory, self._device = memory, device

    def begin(self) -> None:
        """Forget what was remembered, and remember from here on, with the lines of Python that allocate."""
        remember_allocations(self._memory)

    def end(self, during: Sequence[During], held: Mapping[int, str]) -> dict[str, Any]:
        """Remember nothing more; returns the snapshot that the visualizer reads.

        Args:
            during: instructions, in the order of their beginnings.
            held: the tensors that are there now, by the addresses of their memory.
        """
        try:
            snapshot = allocations(self._memory)
        finally:
            forget_allocations(self._memory)
        return with_names(snapshot, self._device.index or 0, during, held)


def with_names(
    snapshot: dict[str, Any], device: int, during: Sequence[During], held: Mapping[int, str]
) -> dict[str, Any]:
    """``snapshot`` with what is known of the memory of ``device``, as :meth:`MemoryHistory.end` takes it."""
    begins = [each.begin // 1000 for each in during]
    trace: list[dict[str, Any]] = []
    allocated: dict[int, int] = {}  # where the trace has the last allocation at an address
    frames: dict[int, list[Frame]] = {}  # of that one, by address
    for event in snapshot["device_traces"][device]:
        found = during[at] if (at := bisect_right(begins, event["time_us"]) - 1) >= 0 else None
        inside = found is not None and event["time_us"] <= found.end // 1000
        own = [found.frame] if found is not None and inside else []
        if event["action"] == "alloc":
            allocated[event["addr"]], frames[event["addr"]] = len(trace), own
        trace.append(_framed(event, own))
    names = dict(_names(snapshot, device, held))
    for address, name in names.items():
        if address in allocated:
            trace[allocated[address]] = _framed(trace[allocated[address]], [name])
    segments = [
        {**segment, "blocks": [_of_block(block, names, frames) for block in segment["blocks"]]}
        if segment["device"] == device
        else segment
        for segment in snapshot["segments"]
    ]
    traces = [trace if i == device else other for i, other in enumerate(snapshot["device_traces"])]
    return {**snapshot, "segments": segments, "device_traces": traces}


def _names(snapshot: Mapping[str, Any], device: int, held: Mapping[int, str]) -> Iterator[tuple[int, Frame]]:
    """The address of each block of ``device`` that tensors of ``held`` lie in, and these as a frame."""
    addresses = sorted(held)
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] != "active_allocated":
                continue
            first = bisect_right(addresses, block["address"] - 1)
            behind = bisect_right(addresses, block["address"] + block["size"] - 1)
            if own := [held[address] for address in addresses[first:behind]]:
                more = f" and {len(own) - 1} more" if len(own) > 1 else ""
                yield block["address"], {"filename": "held", "line": 0, "name": own[0] + more}


def _of_block(
    block: Mapping[str, Any], names: Mapping[int, Frame], frames: Mapping[int, list[Frame]]
) -> Mapping[str, Any]:
    """``block`` with the frames of its allocation, and the names of the tensors in it."""
    if block["state"] != "active_allocated":
        return block
    own = [names[block["address"]]] if block["address"] in names else []
    return _framed(block, [*own, *frames.get(block["address"], ())])


def _framed(there: Mapping[str, Any], own: Sequence[Frame]) -> dict[str, Any]:
    """``there`` with more frames, the innermost first. Its own list may be others' too."""
    return {**there, "frames": [*own, *there.get("frames", ())]}
