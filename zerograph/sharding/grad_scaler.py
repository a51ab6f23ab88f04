"""``GradScaler`` over sharded gradients: what one rank finds not finite, all ranks skip and scale down for.

torch's own handler of DTensors reduces what was found over ranks, but decides by the first gradient alone whether ranks
hold different rows. Where that belongs to a parameter with fewer rows than ranks, which is whole on each, nothing is
reduced: some ranks step and others do not, and their scales differ from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import found_inf_reduce_handler

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def find_inf_on_all_ranks() -> None:
    """Let torch's handler see a gradient that is split first, where there is one. Idempotent.

    The table of handlers is private and one per process; the order of gradients means nothing to the operator. Seen in
    torch 2.11 to 2.13.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_UNSCALE] = _split_first


def _split_first(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grads, *others = args
    in_order = sorted(grads, key=lambda grad: all(placement.is_replicate() for placement in grad.placements))
    found_inf_reduce_handler(op, (in_order, *others), kwargs)
