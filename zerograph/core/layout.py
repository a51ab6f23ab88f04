"""How a tensor lies over the ranks that share it, and what brings it from one layout to another. No torch.

Rows of shards are counted here and nowhere else. A parameter has three layouts: at home, between steps, each rank has
its rows; where it is computed with, each has the whole; and of its gradient each has a term of the sum. One that is not
split has the whole at home, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from zerograph.core.units import counted, is_number

Portion = Literal["rows", "whole", "term"]
Collective = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a tensor that each of some ranks has.

    Attributes:
        part: its "rows", as ``torch.chunk`` divides them; the "whole"; or a "term" of its sum, as large as the whole.
        ranks: that share it: those along one axis of a mesh.

    Raises:
        ValueError: another part, or no ranks.
    """

    part: Portion
    ranks: int

    def __post_init__(self) -> None:
        if self.part not in get_args(Portion) or not is_number(self.ranks, int) or self.ranks < 1:
            raise ValueError(f"{self.part!r} over {self.ranks!r} ranks is no layout")

    @classmethod
    def home(cls, ranks: int, *, sharded: bool) -> Layout:
        """That of a parameter between steps."""
        return cls("rows" if sharded else "whole", ranks)

    def __str__(self) -> str:
        return f"{self.part} over {counted(self.ranks, 'rank')}"

    def over(self, ranks: int) -> Layout:
        """The same over so many ranks."""
        return self if ranks == self.ranks else Layout(self.part, ranks)

    def most(self, size: int) -> int:
        """The most rows of ``size`` ones that a rank has."""
        return largest(size, self.ranks) if self.part == "rows" else size

    def rows(self, size: int, rank: int) -> slice:
        """The rows of ``size`` ones that ``rank`` has; none, at the end, where those before it have all."""
        return rows_of(size, rank, self.ranks) if self.part == "rows" else slice(0, size)


def is_divided(shape: Sequence[int], ranks: int) -> bool:
    """Whether a parameter of that ``shape`` is split by rows: there is one for each of ``ranks``."""
    return len(shape) > 0 and shape[0] >= ranks


def split_dimension(shape: Sequence[int], ranks: int, *, by_rows: bool = True) -> int | None:
    """The dimension along which ranks split a parameter of that ``shape``: its rows, where :func:`is_divided`; of three
    or more, with the rows of a few experts, else the first that ``ranks`` divide evenly. None where it stays unsharded,
    as one of a single row does, which positions and tokens of models for images have: it is small.

    Args:
        by_rows: False asks for another dimension, of one row as well.
    """
    if by_rows and is_divided(shape, ranks):
        return 0
    if len(shape) < 3 or (by_rows and shape[0] == 1):
        return None
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def folded(shape: Sequence[int], dim: int, ranks: int) -> list[int]:
    """A parameter of that ``shape`` that ``ranks`` split along ``dim``, as one that they split by rows: their
    parts, one behind the other."""
    found = list(shape)
    if dim:
        found[dim] //= ranks
        found[0] *= ranks
    return found


def transition(source: Portion, target: Portion) -> Collective | None:
    """The collective that brings a tensor from one layout to another over the same ranks; None where nothing has to."""
    return _TRANSITIONS.get((source, target))


_TRANSITIONS: dict[tuple[Portion, Portion], Collective] = {
    ("rows", "whole"): "all-gather",
    ("term", "rows"): "reduce-scatter",
    ("term", "whole"): "all-reduce",
}


def largest(size: int, ranks: int) -> int:
    """The most that one of ``ranks`` has of a dimension of that ``size``."""
    return -(-size // ranks)


def rows_of(size: int, rank: int, ranks: int) -> slice:
    """The rows that ``rank`` has of ``size`` ones that are split over ``ranks``."""
    most = largest(size, ranks)
    return slice(min(rank * most, size), min((rank + 1) * most, size))
