"""How the shards of a bucket lie in extents: one behind another, each state of them in an extent of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerograph.runtime.offload.extents import ALIGNMENT
from zerograph.runtime.timings import Purpose, TimedUpdate

UNIT = ALIGNMENT // 2
"""Elements: transfers of extents begin and end at multiples, whole blocks of the disk in any dtype of two bytes or
more."""

_ALIGNED = 64
"""Elements: each shard begins at a multiple, where vector loads are aligned."""


class ShardRun(NamedTuple):
    """Shards of a block that lie next to each other, from one element to another: one transfer moves them."""

    begin: int
    end: int
    names: tuple[str, ...]


@dataclass(eq=False, slots=True)
class Block:
    """Shards of one bucket and dtype whose placements are the same.

    Attributes:
        name: of the bucket.
        dtype: of the parameters.
        begins: by parameter, its first element.
        ends: by parameter, one past its last element, without what pads it.
        elements: of all, padded to whole units.
    """

    name: str
    dtype: torch.dtype
    begins: dict[str, int]
    ends: dict[str, int]
    elements: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, counts: Mapping[str, int]) -> Block:
        """The block of parameters with ``counts`` elements on this rank."""
        begins, ends, end = {}, {}, 0
        for param, count in counts.items():
            begins[param], ends[param] = end, end + count
            end += -(-count // _ALIGNED) * _ALIGNED
        return cls(name, dtype, begins, ends, -(-end // UNIT) * UNIT)

    def purpose(self, what: str, update: TimedUpdate | None = None) -> Purpose:
        """That of ``what`` of its shards, for recordings."""
        return Purpose(what, next(iter(self.begins)), update)

    def runs(self, names: Collection[str]) -> Iterator[ShardRun]:
        """``names`` in as few runs as can be; a run that ends with the block has its padding too."""
        run: list[str] = []
        wanted = set(names)
        for name in self.begins:
            if name in wanted:
                run.append(name)
            elif run:
                yield ShardRun(self.begins[run[0]], self.begins[name], tuple(run))
                run = []
        if run:
            yield ShardRun(self.begins[run[0]], self.elements, tuple(run))

    def reads(self, names: Collection[str]) -> list[ShardRun]:
        """``names`` in runs of whole units, with what little lies between."""
        found: list[ShardRun] = []
        for run in self.runs(names):
            begin, end = run.begin // UNIT * UNIT, -(-run.end // UNIT) * UNIT
            if found and begin - found[-1].end <= _BETWEEN:
                found[-1] = ShardRun(found[-1].begin, end, found[-1].names + run.names)
            else:
                found.append(ShardRun(begin, end, run.names))
        return found


_BETWEEN = 2**16
"""Elements that are read in vain rather than by a transfer of its own for what lies behind them."""


class StatePlace(NamedTuple):
    """Where the states of a parameter are."""

    block: Block
    begin: int
