"""The markers run eagerly: whole parameters from rows, averaged gradients back, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run

from zerograph.graph import ops
from zerograph.sharding import markers  # noqa: F401  how they run

ROWS = (5, 3)


def _round_trip(sharded: bool, dtype: torch.dtype) -> None:
    """Of five rows rank 1 of two holds two; gradients differ from rank to rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD.group_name if world > 1 else ""  # type: ignore[union-attr]
    full = torch.arange(15.0).view(ROWS)
    rows = -(-ROWS[0] // world)
    shard = (full[rank * rows :][:rows] if sharded else full).clone().requires_grad_()
    gathered = ops.UNSHARD(shard, list(ROWS), "w", group, dtype, torch.float32, sharded)
    assert gathered.dtype is dtype and torch.equal(gathered.detach(), full.to(dtype))
    assert gathered.data_ptr() != shard.data_ptr()
    (gathered.float() * (rank + 1)).sum().backward()
    assert shard.grad is not None and shard.grad.dtype is torch.float32
    assert torch.equal(shard.grad, torch.full_like(shard, sum(range(1, world + 1)) / world))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world", "sharded"), [(1, False), (2, True), (2, False)])
def test_a_full_tensor_and_its_averaged_gradient(world: int, sharded: bool, dtype: torch.dtype) -> None:
    run(world, _round_trip, sharded, dtype)


def _library_checks() -> None:
    """That fake results and the formula of the gradient agree with what really runs; the shapes do, whoever asks."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    shard = torch.randn(3, 2, requires_grad=True)
    args = (shard, [3, 2], "w", group, torch.float32, torch.float32, True)
    torch.library.opcheck(
        ops.UNSHARD, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    grad = (torch.randn(3, 2), [3, 2], torch.float32, "w", group, torch.float32, torch.float32, True)
    torch.library.opcheck(ops.REDUCE_GRAD, grad, test_utils=("test_schema", "test_faketensor"))


def test_markers_are_proper_operators() -> None:
    run(1, _library_checks)
