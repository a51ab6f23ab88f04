"""``GradScaler`` over sharded gradients: what one rank finds not finite, all ranks skip and scale down for.

torch's own handler of DTensors reduces what was found over ranks, but decides by the first gradient alone which ranks
hold different parts. Where that belongs to a parameter that is unsharded on each, or to experts that few ranks divide,
not all hear of it: some ranks step and others do not, and their scales differ from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.distributed.tensor import DTensor

from zerograph.runtime.dtensors import groups_of_ranks
from zerograph.sharding.torch_private import unscale_in_order


def find_inf_on_all_ranks() -> None:
    """Let torch's handler see the gradient first that most ranks split. Idempotent.

    The order of gradients means nothing to the operator.
    """
    unscale_in_order(_most_split_first)


def _most_split_first(grads: Sequence[DTensor]) -> list[DTensor]:
    return sorted(grads, key=lambda grad: -prod(group.size() for group in groups_of_ranks(grad)))
