"""The private names of torch that integrations need, where no public name exists."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd

_all_gather = getattr(_functional_collectives, "all_gather_single", None) or _functional_collectives.all_gather_tensor


def all_to_all(x: Tensor, group: dist.ProcessGroup, *, scattered: int, gathered: int) -> Tensor:
    """``x`` split along dimension ``scattered`` over the ranks of ``group``, whose parts are joined along ``gathered``.

    An operator of graphs, with a backward. Public collectives write into a tensor, and those of
    ``torch.distributed.nn`` are functions that Dynamo cannot trace. Seen in 2.13.
    """
    ranks = group.size()
    sent = torch.stack(x.chunk(ranks, dim=scattered))
    each = [sent.shape[1]] * ranks
    received = all_to_all_single_autograd(sent.flatten(0, 1), each, each, group)
    return torch.cat(received.view(sent.shape).unbind(0), dim=gathered)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of all ranks of ``group``, joined along dimension 1. An operator of graphs, without a backward."""
    return _all_gather(x.contiguous(), 1, group)


def assert_on_all_ranks(holds: Tensor, group: dist.ProcessGroup, message: str) -> None:
    """Raise a ``RuntimeError`` on every rank of ``group`` if ``holds`` is false on one: alone that one would let the
    others wait for it. A part of graphs, where no public name asserts what a tensor says. Seen in 2.13."""
    failed = all_reduce(holds.logical_not().int(), "max", group)
    torch._assert_async(failed == 0, message)
