"""When each bucket is gathered and freed within one phase, by the rules of the passes ``gather`` and ``prefetch``.

The uses of a bucket fall into visits; a bucket whose next use lies beyond ``prefetch`` other buckets is freed and
gathered again. Here they are told from which buckets a sequence of pieces of work reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerograph.core.prefetching import gather_starts, visit_numbers


@dataclass(frozen=True, slots=True)
class Visit:
    """A stretch of work during which a bucket is whole.

    Attributes:
        bucket: which one.
        start: the piece of work before which it is waited for.
        last: the last piece of work that reads it.
        freed: the visit at whose start it is freed; the number of visits for the end.
    """

    bucket: int
    start: int
    last: int
    freed: int


def visits(uses: Sequence[tuple[int, ...]], begins: Sequence[int], prefetch: int) -> tuple[Visit, ...]:
    """The visits of a phase.

    Args:
        uses: the buckets that each piece of work reads, in order.
        begins: per piece, the first piece of the layer it belongs to, where a cut is free.
        prefetch: buckets gathered ahead, at most.
    """
    found = _stretches(uses, prefetch)
    starts = [_start(first, uses, begins) for _, first, _ in found]
    freed = []
    for i, (_, _, last) in enumerate(found):
        freed.append(next((k for k in range(i + 1, len(found)) if starts[k] > last), len(found)))
    return tuple(Visit(bucket, starts[i], last, freed[i]) for i, (bucket, _, last) in enumerate(found))


def gathers(found: Sequence[Visit], prefetch: int, ahead: Sequence[int]) -> dict[int, list[int]]:
    """Visit -> those whose gathers begin at its start.

    Args:
        ahead: of each bucket, how many visits before its own its gathers begin, at most; all ``prefetch`` unless told.
    """
    begin: dict[int, list[int]] = {}
    buckets = [visit.bucket for visit in found]
    limits = [ahead[bucket] for bucket in buckets] if ahead else None
    for i, start in enumerate(gather_starts(buckets, [visit.freed for visit in found], prefetch, limits)):
        begin.setdefault(start, []).append(i)
    return begin


def _stretches(uses: Sequence[tuple[int, ...]], prefetch: int) -> list[tuple[int, int, int]]:
    """Bucket, first and last piece of every visit, in order of the first."""
    sequence = [(piece, bucket) for piece, buckets in enumerate(uses) for bucket in buckets]
    found: dict[int, tuple[int, int, int]] = {}
    numbers = visit_numbers([bucket for _, bucket in sequence], prefetch)
    for number, (piece, bucket) in zip(numbers, sequence, strict=True):
        _, first, _ = found.get(number, (bucket, piece, piece))
        found[number] = (bucket, first, piece)
    return list(found.values())


def _start(first: int, uses: Sequence[tuple[int, ...]], begins: Sequence[int]) -> int:
    """With its layer, if nothing in that is used before, else right before its first use."""
    begin = begins[first]
    return first if any(uses[k] for k in range(begin, first)) else begin
