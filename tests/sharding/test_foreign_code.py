"""Other code that meets sharded parameters: each error names the line to write, and that line works."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import zerograph
from zerograph.core.errors import UnsupportedError


def _sharded() -> nn.Linear:
    model = nn.Linear(4, 6)
    zerograph.shard(model, zerograph.backend())
    return model


def _synchronized_by_hand() -> None:
    """As loops do that average gradients, or send rank 0's weights, themselves."""
    model = _sharded()
    for collective in (
        lambda: dist.broadcast(model.weight.data, 0),
        lambda: dist.all_reduce(model.bias.data),
        lambda: dist.reduce(model.bias.data, 0),
    ):
        with pytest.raises(UnsupportedError, match=r"c10d\.\w+_\.default") as caught:
            collective()
        assert "ZeroGraph starts all from rank 0's values and averages gradients" in caught.value.hint
    rows = model.weight.to_local().detach()
    dist.all_reduce(rows)  # as the hint says
    assert rows.shape == (3, 4)


def _wrapped_late() -> None:
    for wrapper in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel):
        with pytest.raises(UnsupportedError, match=f"wrapped by {wrapper.__name__}"):
            wrapper(_sharded())
    around = nn.Sequential(_sharded(), nn.Linear(6, 3))
    with pytest.raises(UnsupportedError, match="wrapped by DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(around)
    ignored = [name for name, _ in around.named_parameters() if name.startswith("0.")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(around, ignored)
    nn.parallel.DistributedDataParallel(around)


def test_collectives_by_hand_are_refused() -> None:
    run(2, _synchronized_by_hand)


def test_wrappers_around_a_sharded_model_are_refused() -> None:
    run(2, _wrapped_late)
