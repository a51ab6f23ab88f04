"""A snapshot that PyTorch's memory visualizer opens: pytorch.org/memory_viz, ``python -m torch.cuda._memory_viz``.

It has the schema of ``torch.cuda.memory._snapshot()``. Tiers stand for GPUs: device is 0, host 1, NVMe 2. Everything in
``holdings`` gets an address from a first-fit allocator, so that the visualizer's view of the allocator has no overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.files.runfile import write_snapshot
from zerograph.core.machine import TIERS
from zerograph.core.timeline import Span

BASE = 1 << 36
"""Where addresses start: not 0, which reads as missing."""


@dataclass(frozen=True, slots=True)
class AddressedHolding:
    """A holding at an address, from ``begin`` to ``end`` in seconds; None stands for outside of the step."""

    holding: Holding
    address: int
    begin: float | None
    end: float | None


def write(file: PlanFile, path: Path) -> None:
    """Write what is held when as a snapshot.

    Raises:
        OSError: ``path`` cannot be written.
    """
    write_snapshot(snapshot(file), path)


def snapshot(file: PlanFile) -> dict[str, Any]:
    """The snapshot itself."""
    placed = {tier: place([h for h in file.holdings if h.tier == tier], file.forecast.spans) for tier in TIERS}
    return {
        "segments": [_segment(device, placed[tier]) for device, tier in enumerate(TIERS) if placed[tier]],
        "device_traces": [list(_trace(placed[tier])) for tier in TIERS],
        "allocator_settings": {},
    }


def place(holdings: Sequence[Holding], spans: Sequence[Span]) -> list[AddressedHolding]:
    """Give every holding the lowest address that is free for all of its time."""
    placed: list[AddressedHolding] = []
    live: list[AddressedHolding] = []
    ordered = sorted((h for h in holdings if h.bytes), key=lambda h: _begin(h, spans) or 0.0)
    for holding in ordered:
        begin = _begin(holding, spans)
        end = None if holding.last == -1 else spans[holding.last].end
        # What begins at the moment at which another ends may have its place, unless that lasts for the moment only.
        live = [p for p in live if p.end is None or begin is None or p.end > begin or p.begin == begin]
        new = AddressedHolding(holding, _gap(live, holding.bytes), begin, end)
        placed.append(new)
        live.append(new)
    return placed


def _begin(holding: Holding, spans: Sequence[Span]) -> float | None:
    return None if holding.first == -1 else spans[holding.first].start


def _gap(live: Sequence[AddressedHolding], size: int) -> int:
    address = BASE
    for other in sorted(live, key=lambda p: p.address):
        if other.address - address >= size:
            break
        address = other.address + other.holding.bytes
    return address


def _trace(placed: Sequence[AddressedHolding]) -> Iterator[dict[str, Any]]:
    """Allocations and releases in time order; what is there from the start has no allocation, as in a real trace."""
    events = [(p.begin, 1, i) for i, p in enumerate(placed) if p.begin is not None]
    # At one moment what ended gives back first, and what is held for that moment only gives back last.
    events += [(p.end, 2 if p.begin == p.end else 0, i) for i, p in enumerate(placed) if p.end is not None]
    for time, order, i in sorted(events):
        for action in ["alloc"] if order == 1 else ["free_requested", "free_completed"]:
            yield {
                "action": action,
                "addr": placed[i].address,
                "size": placed[i].holding.bytes,
                "stream": 0,
                "time_us": round(time * 1e6),
                "frames": _frames(placed[i].holding),
            }


def _segment(device: int, placed: Sequence[AddressedHolding]) -> dict[str, Any]:
    """All memory of a tier as one segment, with the blocks that are left at the end of the step."""
    blocks = list(_blocks(placed))
    active = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    return {
        "device": device,
        "address": BASE,
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _blocks(placed: Sequence[AddressedHolding]) -> Iterator[dict[str, Any]]:
    address = BASE
    for p in sorted((p for p in placed if p.end is None), key=lambda p: p.address):
        if p.address > address:
            yield _block(address, p.address - address, "inactive", [])
        yield _block(p.address, p.holding.bytes, "active_allocated", _frames(p.holding))
        address = p.address + p.holding.bytes
    top = max(p.address + p.holding.bytes for p in placed)
    if top > address:
        yield _block(address, top - address, "inactive", [])


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _frames(holding: Holding) -> list[dict[str, Any]]:
    """The frames of ``holding``: its name, kind and source line as the innermost one, its module as the outer one."""
    name, _, line = holding.source.rpartition(":")
    where = (name, int(line)) if name and line.isdigit() else (holding.source or "unknown", 0)
    frames = [{"filename": where[0], "line": where[1], "name": f"{holding.name} ({holding.kind})"}]
    return [*frames, {"filename": "module", "line": 0, "name": holding.module}] if holding.module else frames
