"""When each bucket is gathered and freed within one phase, by the rules of the passes ``gather`` and ``prefetch``.

The uses of a bucket fall into visits; a bucket whose next use lies beyond ``prefetch`` other buckets is freed and
gathered again. Here they are told from which buckets a sequence of pieces of work reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerograph.prefetching import gather_starts, visit_numbers


@dataclass(frozen=True, slots=True)
class Visit:
    """A stretch of work during which a bucket is whole.

    Attributes:
        bucket: which one.
        start: the piece of work before which it is waited for.
        last: the last piece of work that reads it.
        gathered: the visit, this or an earlier one, at whose start its gather begins.
        freed: the visit at whose start it is freed; the number of visits for the end.
    """

    bucket: int
    start: int
    last: int
    gathered: int
    freed: int


def visits(uses: Sequence[tuple[int, ...]], begins: Sequence[int], prefetch: int) -> tuple[Visit, ...]:
    """The visits of a phase.

    Args:
        uses: the buckets that each piece of work reads, in order.
        begins: per piece, the first piece of the layer it belongs to, where a cut is free.
        prefetch: buckets gathered ahead.
    """
    found = _stretches(uses, prefetch)
    starts = [_start(first, uses, begins) for _, first, _ in found]
    freed = []
    for i, (_, _, last) in enumerate(found):
        freed.append(next((k for k in range(i + 1, len(found)) if starts[k] > last), len(found)))
    gathered = gather_starts([bucket for bucket, _, _ in found], freed, prefetch)
    return tuple(Visit(bucket, starts[i], last, gathered[i], freed[i]) for i, (bucket, _, last) in enumerate(found))


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
