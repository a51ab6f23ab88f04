"""``GradScaler`` over sharded gradients: what one rank finds not finite, all ranks skip and scale down for.

torch's own handler of DTensors reduces what was found over ranks, but decides by the first gradient alone whether ranks
hold different rows. Where that belongs to a parameter with fewer rows than ranks, which is unsharded on each, nothing
is reduced: some ranks step and others do not, and their scales differ from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from zerograph.runtime.dtensors import is_replicated
from zerograph.sharding.torch_private import unscale_in_order


def find_inf_on_all_ranks() -> None:
    """Let torch's handler see a gradient that is split first, where there is one. Idempotent.

    The order of gradients means nothing to the operator.
    """
    unscale_in_order(_split_first)


def _split_first(grads: Sequence[DTensor]) -> list[DTensor]:
    return sorted(grads, key=is_replicated)
