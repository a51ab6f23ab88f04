"""How much memory a segment takes while it runs: a layer of a coarse program, or a compiled segment. No torch.

The rule of both, so that the planner's count of a step and the forecast of its programs agree:

- Memory is what kernels of their own write (products, reductions, scatters), what products read, and what outlives the
  segment. Everything else fuses into what reads it.
- It is taken where it is written, and free after the last kernel that reads it, be it through operators that fuse.
- An element-wise kernel writes over what a product or such a kernel of the segment has made, has its size, is not read
  after it, and is summed nowhere: a reduction fuses with it, and one kernel that reads memory twice writes elsewhere.
- An input of the segment is free after its last use too, if nobody else holds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class Operator(NamedTuple):
    """One operator of a segment; views are none.

    Attributes:
        writes: the memory that it writes, under a name of the caller's.
        reads: the memory that it reads.
        bytes: that it writes.
        kernel: whether it never fuses into what reads it.
        product: whether what it reads has to be there whole.
    """

    writes: Hashable
    reads: Sequence[Hashable]
    bytes: int
    kernel: bool
    product: bool


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """The memory that a segment holds, in intervals that end where an input of it is read last.

    Attributes:
        levels: by interval, the most bytes that it has made and not freed.
        begins: by interval, the operator that it begins with.
        left: bytes that outlive the segment.
        until: of what it is given, the interval of the last use.
    """

    levels: tuple[int, ...] = (0,)
    begins: tuple[int, ...] = (0,)
    left: int = 0
    until: Mapping[Hashable, int] = field(default_factory=dict)

    def held(self, dying: Iterable[tuple[Hashable, int]] = ()) -> list[int]:
        """By interval, the most bytes that it holds beyond those that were there when it began.

        Args:
            dying: what it is given and nobody else holds, with bytes.
        """
        gone = [0] * (len(self.levels) + 1)
        for name, size in dying:
            if name in self.until:
                gone[self.until[name] + 1] += size
        return [level - less for level, less in zip(self.levels, accumulate(gone), strict=False)]

    def extra(self, dying: Iterable[tuple[Hashable, int]] = ()) -> int:
        """The most that it holds beyond what was there and what it leaves behind; less than 0 where that takes the
        place of what is ``dying``."""
        return max(self.held(dying)) - self.left


def segment_profile(
    operators: Sequence[Operator], stays: Collection[Hashable], cuts: Sequence[int] = ()
) -> SegmentProfile:
    """Follow ``operators``.

    Args:
        stays: memory that outlives the segment.
        cuts: operators with which an interval begins, whatever is read last before it.
    """
    materialized = {name for op in operators if op.product for name in op.reads}
    takes = [op.bytes if op.kernel or op.writes in materialized or op.writes in stays else 0 for op in operators]
    ends = _kernel_ends(operators)
    last = _last_uses(operators, takes, ends)
    reduced = _reduced(operators, takes)
    made = {op.writes for op in operators}
    given = {name: at for name, at in last.items() if name not in made}
    begins = sorted({0, *cuts, *(at + 1 for at in given.values() if at + 1 < len(operators))})
    starting = frozenset(begins)
    dying: dict[int, int] = {}
    spare: set[tuple[int, int]] = set()  # an operator, and bytes that it may write over
    levels: list[int] = []
    live = 0
    for at, (op, size) in enumerate(zip(operators, takes, strict=True)):
        if at in starting:
            levels.append(live)
        if size:
            live += size
            levels[-1] = max(levels[-1], live - size * (not op.kernel and (ends[at], size) in spare))
            if op.writes not in stays:
                end = last.get(op.writes, at)
                dying[end] = dying.get(end, 0) + size
                if (op.product or not op.kernel) and op.writes not in reduced:
                    spare.add((end, size))
        live -= dying.pop(at, 0)
    left = sum(size for op, size in zip(operators, takes, strict=True) if op.writes in stays)
    until = {name: bisect_right(begins, at) - 1 for name, at in given.items()}
    return SegmentProfile(tuple(levels) or (0,), tuple(begins), left, until)


def _kernel_ends(operators: Sequence[Operator]) -> list[int]:
    """For each operator, the last one of its kernel: operators that fuse and follow one another may become one."""
    ends = list(range(len(operators)))
    for at in reversed(range(len(operators) - 1)):
        if not operators[at].kernel and not operators[at + 1].kernel:
            ends[at] = ends[at + 1]
    return ends


def _reduced(operators: Sequence[Operator], takes: Sequence[int]) -> set[Hashable]:
    """Memory that a kernel which is no product reads, also through what fuses into that."""
    found = set[Hashable]()
    for op, size in zip(reversed(operators), reversed(takes), strict=True):
        if (op.kernel and not op.product) or (not size and op.writes in found):
            found.update(op.reads)
    return found


def _last_uses(operators: Sequence[Operator], takes: Sequence[int], ends: Sequence[int]) -> dict[Hashable, int]:
    """For each memory, the last operator that reads it; one that fuses reads where its kernel runs."""
    last: dict[Hashable, int] = {}
    for at in reversed(range(len(operators))):
        op = operators[at]
        use = ends[at] if op.kernel or takes[at] else last.get(op.writes, at)
        for name in op.reads:
            if last.get(name, -1) < use:
                last[name] = use
    return last
