"""The cost of operations, on whatever machine they run. No torch in here."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Counted(Protocol):
    """An operation, or several in one."""

    @property
    def flops(self) -> int:
        """Floating-point operations, of products, convolutions and attention only."""

    @property
    def moved(self) -> int:
        """Bytes read and written."""

    @property
    def packed(self) -> int:
        """Bytes of the matrices that are multiplied, which a CPU's libraries first copy into blocks."""

    @property
    def attention(self) -> int:
        """Of ``flops``, those of fused attention, whose kernels reach another rate than products."""


class Cost(NamedTuple):
    """As :class:`Counted`, and nothing else."""

    flops: int = 0
    moved: int = 0
    packed: int = 0
    attention: int = 0

    @classmethod
    def of(cls, *parts: Counted) -> Cost:
        """That of all ``parts``."""
        return cls(
            sum(each.flops for each in parts),
            sum(each.moved for each in parts),
            sum(each.packed for each in parts),
            sum(each.attention for each in parts),
        )

    def of_share(self, parts: int) -> Cost:
        """That of one of so many equal parts."""
        return Cost(*(count // parts for count in self))
