"""A step at a size of its inputs that was not traced, from the same step at sizes that were.

Where a model does the same operations at every size, their bytes and work are polynomials: they grow with the batch in
proportion, and with the square of the sequence at most, as attention has a number for each pair of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from math import lcm, prod

from zerograph.core.cost import Cost
from zerograph.core.step import Dimension, Step

POINTS: Mapping[Dimension, int] = {"batch": 2, "seq": 3}
"""Sizes that tell how a step grows."""
MOST_POINTS = 3
"""Sizes that are used where more are known: a loss may have a number for each pair of sequences, too."""


def outline(step: Step) -> object:
    """The parts of a step that depend on no size: steps with equal ones do the same operations."""
    ops = tuple(replace(op, **Cost()._asdict()) for op in step.ops)
    values = tuple(replace(value, bytes=0) for value in step.values)
    lookups = tuple(replace(lookup, last=0) for lookup in step.lookups)
    return ops, values, step.params, step.training, step.outputs, lookups


def interpolated(known: Mapping[int, Step], size: int) -> Step:
    """The step at ``size``, each of its numbers on the polynomial through those of ``known``, of which it is exact.

    Args:
        known: by size, steps of one :func:`outline`.
    """
    at = _polynomial(tuple(known), size)
    first, steps = next(iter(known.values())), tuple(known.values())
    every_op, every_value, every_lookup = (
        zip(*(getattr(step, part) for step in steps), strict=True) for part in ("ops", "values", "lookups")
    )
    ops = (
        # Most operations cost nothing at any size, and are shared in place of copied.
        op[0] if not op[0].flops and not op[0].moved else replace(
            op[0], **{cost: at(tuple(getattr(o, cost) for o in op)) for cost in Cost._fields}
        )
        for op in every_op
    )  # fmt: skip
    values = (replace(value[0], bytes=at(tuple(v.bytes for v in value))) for value in every_value)
    lookups = (replace(lookup[0], last=at(tuple(one.last for one in lookup))) for lookup in every_lookup)
    return replace(first, ops=tuple(ops), values=tuple(values), lookups=tuple(lookups))


def _polynomial(sizes: tuple[int, ...], size: int) -> Callable[[tuple[int, ...]], int]:
    """The function from numbers at ``sizes`` to the one at ``size`` (Lagrange), rounded up, and at least nothing.

    Deep models repeat layers: few numbers differ, and those are computed.
    """
    # Fractions: a float would round bytes of large steps, and these numbers are exact by construction.
    shares = [prod((Fraction(size - b, a - b) for b in sizes if b != a), start=Fraction(1)) for a in sizes]
    scale = lcm(*(share.denominator for share in shares))
    weights = [int(share * scale) for share in shares]
    found: dict[tuple[int, ...], int] = {}

    def at(numbers: tuple[int, ...]) -> int:
        if numbers not in found:
            total = sum(weight * number for weight, number in zip(weights, numbers, strict=True))
            found[numbers] = max(0, -(-total // scale))
        return found[numbers]

    return at
